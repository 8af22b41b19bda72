//! The reference: one element at a time, in portable arithmetic. Every instruction set
//! must give the same bits; processors without one run it.

use half::{bf16, f16};

use super::pass::{Job, Set, pass};
use super::vector::{Bits, Float, NAN_F32, NAN_F64, Op, Vector, Wide, vector};

/// The portable instruction set.
pub(super) struct Scalar;

impl Set for Scalar {
    type F32 = F32;
    type F64 = F64;
    type I8 = I8;
    type U8 = U8;
    type I32 = I32;
    type I64 = I64;

    unsafe fn run<V: Vector, O: Op<V>>(job: &Job<'_>) {
        // SAFETY: handed on from the caller; any processor will do.
        unsafe { pass::<V, O>(job) }
    }
}

macro_rules! float {
    ($name:ident, $t:ty, $nan:expr) => {
        vector! {
            $name of [$t; 1] in $t;
            memory {
                load(p) = p.read();
                store(p, a) = p.write(a);
            }
            arithmetic {
                sum(a, x) = a + x;
                product(a, x) = a * x;
                // `x.is_nan()` takes a NaN over; after that no comparison is true, so
                // it stays. Bitwise `|` keeps the loop free of branches.
                min(a, x) = if (x < a) | x.is_nan() { x } else { a };
                max(a, x) = if (x > a) | x.is_nan() { x } else { a };
                canonical(a) = if a.is_nan() { $nan } else { a };
            }
            float {
                inverse_of(world) = 1.0 / world as $t;
            }
        }
    };
}
float!(F32, f32, NAN_F32);
float!(F64, f64, NAN_F64);

macro_rules! integer {
    ($name:ident, $t:ty) => {
        vector! {
            $name of [$t; 1] in $t;
            memory {
                load(p) = p.read();
                store(p, a) = p.write(a);
            }
            arithmetic {
                sum(a, x) = a.wrapping_add(x);
                product(a, x) = a.wrapping_mul(x);
                min(a, x) = Ord::min(a, x);
                max(a, x) = Ord::max(a, x);
            }
            bits {
                and(a, x) = a & x;
                or(a, x) = a | x;
                xor(a, x) = a ^ x;
            }
        }
    };
}
integer!(I8, i8);
integer!(U8, u8);
integer!(I16, i16);
integer!(U16, u16);
integer!(I32, i32);
integer!(U32, u32);
integer!(I64, i64);
integer!(U64, u64);

impl Wide for F32 {
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: handed on from the caller. The `const` forms never use
        // the processor's own conversions.
        F32(unsafe { from.read() }.to_f32_const())
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        // SAFETY: handed on from the caller.
        unsafe { to.write(f16::from_f32_const(self.0)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> [Self; 2] {
        // SAFETY: handed on from the caller.
        let (a, b) = unsafe { (from.read(), from.add(1).read()) };
        [F32(bf16_to_f32(a)), F32(bf16_to_f32(b))]
    }
    #[inline(always)]
    unsafe fn store_bf16([a, b]: [Self; 2], to: *mut bf16) {
        // SAFETY: handed on from the caller.
        unsafe {
            to.write(bf16_from_f32(a.0));
            to.add(1).write(bf16_from_f32(b.0));
        }
    }
}

/// `bf16::to_f32` without its NaN branch: NaNs are made canonical later.
#[inline(always)]
pub(super) fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Round to nearest even, as `bf16::from_f32`, without branches.
#[inline(always)]
pub(super) fn bf16_from_f32(x: f32) -> bf16 {
    let bits = x.to_bits();
    // Adding half a unit, less one when the kept part is even, carries into the kept
    // part exactly when the number is to be rounded up. The canonical NaN has only
    // zeros in the dropped part, so nothing carries.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    bf16::from_bits(rounded as u16)
}
