//! The block product: 32 x 32 sums, two by two tiles.

use std::mem::MaybeUninit;
#[cfg(target_os = "linux")]
use std::mem::offset_of;

use super::SIDE;
use crate::isa::has_tiles;
use crate::vector::LANES;
use std::arch::x86_64::*;

/// `c (+)= a b` for 32 rows and 32 columns.
///
/// Rows of `a` hold bf16 values; every run starts `offsets[i]` bytes behind the
/// row's pointer and is `run` blocks of 32 values long. `b` lies in panels of 16
/// columns: a block is 1 KiB, sixteen rows of sixteen pairs of values.
#[repr(C)]
pub(super) struct Block {
    /// First rows of the two tiles.
    pub a: [*const u8; 2],
    /// Bytes between rows of a tile.
    pub a_stride: usize,
    pub offsets: *const isize,
    /// At least one.
    pub runs: usize,
    /// At least one.
    pub run: usize,
    pub b: *const u8,
    /// Bytes from a panel to the next.
    pub b_panel: usize,
    /// First rows of the two tiles of sums.
    pub c: [*mut f32; 2],
    /// Bytes between rows of sums.
    pub c_stride: usize,
    /// Whether to continue the sums found in `c`: 0 or 1.
    pub add: usize,
}

/// Sums of one block that do not go straight to their place.
#[repr(C, align(64))]
pub(super) struct Sums(MaybeUninit<[f32; SIDE * SIDE]>);

impl Sums {
    pub(super) fn new() -> Self {
        Sums(MaybeUninit::uninit())
    }

    /// Multiplies a block into these sums, which start from zero.
    ///
    /// # Safety
    /// As [`Tiles::multiply`], but for `c`.
    pub(super) unsafe fn multiply(&mut self, tiles: &Tiles, b: &mut Block) -> &[f32; SIDE * SIDE] {
        let to = self.0.as_mut_ptr().cast::<f32>();
        b.c = [to, to.wrapping_add(SIDE / 2 * SIDE)];
        b.c_stride = SIDE * size_of::<f32>();
        b.add = 0;
        // SAFETY: the caller's promise; the product writes every sum.
        unsafe {
            tiles.multiply(b);
            self.0.assume_init_ref()
        }
    }
}

/// Sixteen rows of 64 bytes for all eight tiles, palette 1.
#[cfg(target_os = "linux")]
#[repr(C, align(64))]
struct Config([u8; 64]);

#[cfg(target_os = "linux")]
static CONFIG: Config = {
    let mut c = [0; 64];
    c[0] = 1;
    let mut i = 0;
    while i < 8 {
        c[16 + 2 * i] = 64;
        c[48 + i] = 16;
        i += 1;
    }
    Config(c)
};

/// The right to multiply blocks on this thread: holds the tiles' configuration, if there are tiles.
pub(super) struct Tiles {
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    amx: bool,
    /// The configuration is the thread's.
    _here: std::marker::PhantomData<*const ()>,
}

impl Tiles {
    pub(super) fn new() -> Self {
        let amx = has_tiles();
        #[cfg(target_os = "linux")]
        if amx {
            // SAFETY: the processor has tiles and the system permits them
            // (`has_tiles`); `CONFIG` is a valid configuration of 64 bytes.
            unsafe {
                std::arch::asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly));
            }
        }
        Tiles {
            amx,
            _here: std::marker::PhantomData,
        }
    }

    /// Multiplies one block.
    ///
    /// # Safety
    /// The processor has AVX-512 with bf16. `offsets` names `runs` offsets; 32 rows of
    /// `a` hold `run` blocks behind each of them; two panels of `b` hold `runs * run` blocks; 32 rows of 32 sums are
    /// valid and touched by no other code. Rows of `c` may coincide.
    pub(super) unsafe fn multiply(&self, b: &Block) {
        debug_assert!(b.runs > 0 && b.run > 0);
        #[cfg(target_os = "linux")]
        if self.amx {
            // SAFETY: tiles are configured on this thread; the rest is the caller's promise.
            return unsafe { multiply_amx(b) };
        }
        // SAFETY: the caller's promise.
        unsafe { multiply_pairs(b) };
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if self.amx {
            // SAFETY: tiles are configured on this thread; none is in use.
            unsafe { std::arch::asm!("tilerelease", options(nostack, nomem)) };
        }
    }
}

/// # Safety
/// As [`Tiles::multiply`], on a thread whose tiles are configured.
#[cfg(target_os = "linux")]
#[inline]
unsafe fn multiply_amx(block: &Block) {
    // SAFETY: reads and writes what the caller promises; tiles are no registers
    // that the compiler uses, and none of them keeps a value past the block.
    unsafe {
        std::arch::asm!(
            "mov {sa}, [{d} + {o_sa}]",
            "mov {b0}, [{d} + {o_b}]",
            "mov {b1}, [{d} + {o_bp}]",
            "add {b1}, {b0}",
            "mov {t}, [{d} + {o_t}]",
            "mov {e}, [{d} + {o_e}]",
            "mov {x:e}, 64",
            "cmp qword ptr [{d} + {o_add}], 0",
            "jne 20f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 22f",
            "20:",
            "mov {p}, [{d} + {o_c0}]",
            "mov {q}, [{d} + {o_sc}]",
            "tileloadd tmm0, [{p} + {q}*1]",
            "tileloadd tmm1, [{p} + {q}*1 + 64]",
            "mov {p}, [{d} + {o_c1}]",
            "tileloadd tmm2, [{p} + {q}*1]",
            "tileloadd tmm3, [{p} + {q}*1 + 64]",
            "22:",
            "mov {q}, [{t}]",
            "mov {p}, {q}",
            "add {p}, [{d} + {o_a0}]",
            "add {q}, [{d} + {o_a1}]",
            "mov {n}, [{d} + {o_n}]",
            "23:",
            "tileloadd tmm4, [{p} + {sa}*1]",
            "tileloadd tmm6, [{b0} + {x}*1]",
            "tileloadd tmm5, [{q} + {sa}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {x}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {p}, 64",
            "add {q}, 64",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {n}",
            "jnz 23b",
            "add {t}, 8",
            "dec {e}",
            "jnz 22b",
            "mov {p}, [{d} + {o_c0}]",
            "mov {q}, [{d} + {o_sc}]",
            "tilestored [{p} + {q}*1], tmm0",
            "tilestored [{p} + {q}*1 + 64], tmm1",
            "mov {p}, [{d} + {o_c1}]",
            "tilestored [{p} + {q}*1], tmm2",
            "tilestored [{p} + {q}*1 + 64], tmm3",
            d = in(reg) std::ptr::from_ref(block),
            sa = out(reg) _,
            b0 = out(reg) _,
            b1 = out(reg) _,
            t = out(reg) _,
            e = out(reg) _,
            x = out(reg) _,
            p = out(reg) _,
            q = out(reg) _,
            n = out(reg) _,
            o_sa = const offset_of!(Block, a_stride),
            o_b = const offset_of!(Block, b),
            o_bp = const offset_of!(Block, b_panel),
            o_t = const offset_of!(Block, offsets),
            o_e = const offset_of!(Block, runs),
            o_n = const offset_of!(Block, run),
            o_a0 = const offset_of!(Block, a),
            o_a1 = const offset_of!(Block, a) + 8,
            o_c0 = const offset_of!(Block, c),
            o_c1 = const offset_of!(Block, c) + 8,
            o_sc = const offset_of!(Block, c_stride),
            o_add = const offset_of!(Block, add),
            options(nostack),
        );
    }
}

/// Rows whose sums one pass keeps in registers.
const ROWS: usize = 8;

/// # Safety
/// As [`Tiles::multiply`], on a processor that multiplies pairs of bf16 values.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply_pairs(block: &Block) {
    for r in (0..SIDE).step_by(ROWS) {
        let half = r / LANES;
        // SAFETY: rows, panels and sums exist, by the caller's promise.
        unsafe {
            let c = block.c[half].byte_add(r % LANES * block.c_stride);
            let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
            if block.add != 0 {
                for (m, [low, high]) in sums.iter_mut().enumerate() {
                    let from = c.byte_add(m * block.c_stride);
                    *low = _mm512_loadu_ps(from);
                    *high = _mm512_loadu_ps(from.add(LANES));
                }
            }
            let mut b = block.b;
            for run in 0..block.runs {
                let a = block.a[half].add(r % LANES * block.a_stride);
                let a = a.offset(*block.offsets.add(run));
                let rows: [*const u8; ROWS] = std::array::from_fn(|m| a.add(m * block.a_stride));
                for k in 0..block.run * LANES {
                    let pairs = |from: *const u8| {
                        std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(from.cast()))
                    };
                    let (low, high) = (pairs(b), pairs(b.add(block.b_panel)));
                    for (row, sums) in rows.iter().zip(&mut sums) {
                        let pair = _mm512_set1_epi32(row.cast::<i32>().add(k).read_unaligned());
                        let pair = std::mem::transmute::<__m512i, __m512bh>(pair);
                        sums[0] = _mm512_dpbf16_ps(sums[0], pair, low);
                        sums[1] = _mm512_dpbf16_ps(sums[1], pair, high);
                    }
                    b = b.add(64);
                }
            }
            for (m, [low, high]) in sums.into_iter().enumerate() {
                let to = c.byte_add(m * block.c_stride);
                _mm512_storeu_ps(to, low);
                _mm512_storeu_ps(to.add(LANES), high);
            }
        }
    }
}
