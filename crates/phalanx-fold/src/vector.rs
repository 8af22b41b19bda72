//! The parts of the kernels: a register of accumulators, and the operators.
//!
//! [`Vector`] is one register's worth (or two) of elements with its
//! arithmetic. Every instruction set implements it for the plain types; the
//! 16-bit floats are written once here, on top of any set's f32 vector.

use half::{bf16, f16};

/// The only NaN in results, whatever the inputs and the processor; see
/// [`Vector::canonical`].
pub(super) const NAN_F32: f32 = f32::from_bits(0x7fc0_0000);
/// As [`NAN_F32`].
pub(super) const NAN_F64: f64 = f64::from_bits(0x7ff8_0000_0000_0000);

/// Several elements, widened to their accumulator type.
///
/// Only unsafe methods such as [`Vector::load`] make values, and they require that the
/// processor has the instruction set. So a value proves that it does, and the other
/// methods are safe.
pub(super) trait Vector: Copy {
    /// The type of an element in memory.
    type Elem: Copy;
    /// Elements at a time, at most 64.
    const LANES: usize;

    /// # Safety
    ///
    /// `LANES` elements are readable, and the processor has the instruction
    /// set.
    unsafe fn load(from: *const Self::Elem) -> Self;

    /// Rounds and writes; NaNs have been made [canonical](Vector::canonical).
    ///
    /// # Safety
    ///
    /// `LANES` elements are writable.
    unsafe fn store(self, to: *mut Self::Elem);

    /// The first `count < LANES` elements; the other lanes have arbitrary values.
    ///
    /// # Safety
    ///
    /// `count` elements are readable, and the processor has the instruction
    /// set.
    #[inline(always)]
    unsafe fn load_part(from: *const Self::Elem, count: usize) -> Self {
        let mut room = Room([0; ROOM_BYTES]);
        // SAFETY: `count` elements are readable, and fewer than `LANES`, which
        // the room has space for; it is zeroed, so all of it may be read.
        unsafe {
            let room = room.0.as_mut_ptr().cast::<Self::Elem>();
            std::ptr::copy_nonoverlapping(from, room, count);
            Self::load(room)
        }
    }

    /// Writes the first `count < LANES` elements.
    ///
    /// # Safety
    ///
    /// `count` elements are writable.
    #[inline(always)]
    unsafe fn store_part(self, to: *mut Self::Elem, count: usize) {
        let mut room = Room([0; ROOM_BYTES]);
        // SAFETY: the room has space for `LANES` elements, of which `count`
        // are copied to where they are writable.
        unsafe {
            let room = room.0.as_mut_ptr().cast::<Self::Elem>();
            self.store(room);
            std::ptr::copy_nonoverlapping(room, to, count);
        }
    }

    fn sum(self, x: Self) -> Self;
    fn product(self, x: Self) -> Self;
    /// `x` where it is less or a NaN, otherwise `self`: a NaN wins, and of
    /// two zeros the first is kept.
    fn min(self, x: Self) -> Self;
    /// `x` where it is greater or a NaN, otherwise `self`.
    fn max(self, x: Self) -> Self;

    /// Every NaN becomes the same one. Which of two NaNs an addition returns, and the
    /// sign of a new one, depend on the processor and on the order of the operands that
    /// the compiler chooses.
    #[inline(always)]
    fn canonical(self) -> Self {
        self
    }
}

/// The widest vectors in memory.
const ROOM_BYTES: usize = 64;

/// One vector's place, aligned for any.
#[repr(align(64))]
struct Room([u8; ROOM_BYTES]);

/// Vectors of types that have a mean.
pub(super) trait Float: Vector {
    /// `1 / world` in every lane, computed in the accumulator's precision.
    ///
    /// # Safety
    ///
    /// The processor has the instruction set.
    unsafe fn inverse_of(world: usize) -> Self;
}

/// Vectors of integers.
pub(super) trait Bits: Vector {
    fn and(self, x: Self) -> Self;
    fn or(self, x: Self) -> Self;
    fn xor(self, x: Self) -> Self;
}

/// An f32 vector that 16-bit floats widen to.
pub(super) trait Wide: Float<Elem = f32> {
    /// Widens `LANES` elements.
    ///
    /// # Safety
    ///
    /// As [`Vector::load`].
    unsafe fn load_f16(from: *const f16) -> Self;

    /// Rounds to nearest, ties to even.
    ///
    /// # Safety
    ///
    /// As [`Vector::store`].
    unsafe fn store_f16(self, to: *mut f16);

    /// Widens `2 * LANES` elements, in an order that depends on the instruction set.
    ///
    /// # Safety
    ///
    /// As [`Vector::load`].
    unsafe fn load_bf16(from: *const bf16) -> [Self; 2];

    /// Rounds to nearest, ties to even, and writes in the order of
    /// [`Wide::load_bf16`]. NaNs are canonical.
    ///
    /// # Safety
    ///
    /// As [`Vector::store`].
    unsafe fn store_bf16(both: [Self; 2], to: *mut bf16);
}

/// Arithmetic of a vector that consists of others.
macro_rules! each {
    ($name:ident $parts:tt $($method:ident)*) => { $(each! { @ $name $parts $method })* };
    (@ $name:ident [$($part:tt)*] $method:ident) => {
        #[inline(always)]
        fn $method(self, x: Self) -> Self {
            $name($(self.$part.$method(x.$part)),*)
        }
    };
}

/// f16 elements as f32 accumulators.
#[derive(Clone, Copy)]
pub(super) struct F16<V>(V);

impl<V: Wide> Vector for F16<V> {
    type Elem = f16;
    const LANES: usize = V::LANES;

    #[inline(always)]
    unsafe fn load(from: *const f16) -> Self {
        // SAFETY: handed on from the caller.
        F16(unsafe { V::load_f16(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f16) {
        // SAFETY: handed on from the caller.
        unsafe { self.0.store_f16(to) }
    }
    each! { F16 [0] sum product min max }
    #[inline(always)]
    fn canonical(self) -> Self {
        F16(self.0.canonical())
    }
}

impl<V: Wide> Float for F16<V> {
    #[inline(always)]
    unsafe fn inverse_of(world: usize) -> Self {
        // SAFETY: handed on from the caller.
        F16(unsafe { V::inverse_of(world) })
    }
}

/// bf16 elements as f32 accumulators, two vectors of them: whole registers are split
/// and merged with shifts, which is cheaper than widening half a register.
#[derive(Clone, Copy)]
pub(super) struct Bf16<V>(V, V);

impl<V: Wide> Vector for Bf16<V> {
    type Elem = bf16;
    const LANES: usize = 2 * V::LANES;

    #[inline(always)]
    unsafe fn load(from: *const bf16) -> Self {
        // SAFETY: handed on from the caller.
        let [a, b] = unsafe { V::load_bf16(from) };
        Bf16(a, b)
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut bf16) {
        // SAFETY: handed on from the caller.
        unsafe { V::store_bf16([self.0, self.1], to) }
    }
    each! { Bf16 [0 1] sum product min max }
    #[inline(always)]
    fn canonical(self) -> Self {
        Bf16(self.0.canonical(), self.1.canonical())
    }
}

impl<V: Wide> Float for Bf16<V> {
    #[inline(always)]
    unsafe fn inverse_of(world: usize) -> Self {
        // SAFETY: handed on from the caller.
        let scale = unsafe { V::inverse_of(world) };
        Bf16(scale, scale)
    }
}

/// One reduction on vectors of one kind.
pub(super) trait Op<V: Vector> {
    /// Its operands other than the elements.
    type State: Copy;

    /// # Safety
    ///
    /// The processor has the instruction set.
    unsafe fn state(world: usize) -> Self::State;
    /// Combines an accumulator and the next source.
    fn apply(a: V, x: V) -> V;
    /// Runs after the last source.
    fn finish(a: V, state: Self::State) -> V;
}

macro_rules! ops {
    ($($op:ident on $kind:ident is $method:ident),* $(,)?) => {$(
        pub(super) struct $op;
        impl<V: $kind> Op<V> for $op {
            type State = ();
            #[inline(always)]
            unsafe fn state(_: usize) {}
            #[inline(always)]
            fn apply(a: V, x: V) -> V {
                a.$method(x)
            }
            #[inline(always)]
            fn finish(a: V, (): ()) -> V {
                a.canonical()
            }
        }
    )*};
}
ops! {
    Sum on Vector is sum,
    Product on Vector is product,
    Min on Vector is min,
    Max on Vector is max,
    BitAnd on Bits is and,
    BitOr on Bits is or,
    BitXor on Bits is xor,
}

/// A sum, multiplied once by `1 / world` before it is rounded.
pub(super) struct Mean;

impl<V: Float> Op<V> for Mean {
    type State = V;
    #[inline(always)]
    unsafe fn state(world: usize) -> V {
        // SAFETY: handed on from the caller.
        unsafe { V::inverse_of(world) }
    }
    #[inline(always)]
    fn apply(a: V, x: V) -> V {
        a.sum(x)
    }
    #[inline(always)]
    fn finish(a: V, scale: V) -> V {
        a.product(scale).canonical()
    }
}

/// Implements the three traits for one register type: each method is an expression over
/// the raw register (`a`, `x`) or an address (`p`).
macro_rules! vector {
    (
        $name:ident of [$elem:ty; $lanes:expr] in $reg:ty;
        memory {
            load($lp:ident) = $load:expr;
            store($sp:ident, $sa:ident) = $store:expr;
        }
        $(part {
            load_part($lpp:ident, $lpn:ident) = $load_part:expr;
            store_part($spp:ident, $spn:ident, $spa:ident) = $store_part:expr;
        })?
        arithmetic {
            $($method:ident($a:ident $(, $x:ident)?) = $body:expr;)*
        }
        $(float {
            inverse_of($world:ident) = $inverse:expr;
        })?
        $(bits {
            $($bit:ident($ba:ident, $bx:ident) = $bit_body:expr;)*
        })?
    ) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name($reg);

        // The portable set needs no unsafe for its arithmetic.
        #[allow(unused_unsafe)]
        impl Vector for $name {
            type Elem = $elem;
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn load($lp: *const $elem) -> Self {
                // SAFETY: handed on from the caller.
                $name(unsafe { $load })
            }
            #[inline(always)]
            unsafe fn store(self, $sp: *mut $elem) {
                let $sa = self.0;
                // SAFETY: handed on from the caller.
                unsafe { $store }
            }
            $(
                #[inline(always)]
                unsafe fn load_part($lpp: *const $elem, $lpn: usize) -> Self {
                    // SAFETY: handed on from the caller.
                    $name(unsafe { $load_part })
                }
                #[inline(always)]
                unsafe fn store_part(self, $spp: *mut $elem, $spn: usize) {
                    let $spa = self.0;
                    // SAFETY: handed on from the caller.
                    unsafe { $store_part }
                }
            )?
            $(
                #[inline(always)]
                fn $method(self $(, $x: Self)?) -> Self {
                    let $a = self.0;
                    $(let $x = $x.0;)?
                    // SAFETY: a value of this type proves that the processor
                    // has the instruction set.
                    $name(unsafe { $body })
                }
            )*
        }
        $(
            #[allow(unused_unsafe)]
            impl Float for $name {
                #[inline(always)]
                unsafe fn inverse_of($world: usize) -> Self {
                    // SAFETY: handed on from the caller.
                    $name(unsafe { $inverse })
                }
            }
        )?
        $(
            #[allow(unused_unsafe)]
            impl Bits for $name {
                $(
                    #[inline(always)]
                    fn $bit(self, x: Self) -> Self {
                        let ($ba, $bx) = (self.0, x.0);
                        // SAFETY: a value of this type proves that the
                        // processor has the instruction set.
                        $name(unsafe { $bit_body })
                    }
                )*
            }
        )?
    };
}
pub(super) use vector;
