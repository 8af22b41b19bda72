//! The block product: 32 x 32 sums, two by two tiles.

use std::mem::MaybeUninit;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use std::mem::offset_of;

use super::SIDE;
use crate::isa::has_tiles;
use crate::vector::{LANES, Vector};

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

/// Bytes of a tile of `b`, and of a panel's block.
pub(super) const TILE_BYTES: usize = 1024;

/// Sixteen rows of 64 bytes for all eight tiles, palette 1.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[repr(C, align(64))]
struct Config([u8; 64]);

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
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

/// The right to multiply blocks on this thread: holds the tiles' configuration.
pub(super) struct Tiles {
    #[cfg_attr(
        not(all(target_arch = "x86_64", target_os = "linux")),
        allow(dead_code)
    )]
    amx: bool,
    /// The configuration is the thread's.
    _here: std::marker::PhantomData<*const ()>,
}

impl Tiles {
    pub(super) fn new() -> Self {
        let amx = has_tiles();
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
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
    /// `offsets` names `runs` offsets; 32 rows of `a` hold `run` blocks behind each
    /// of them; two panels of `b` hold `runs * run` blocks; 32 rows of 32 sums are
    /// valid and touched by no other code. Rows of `c` may coincide.
    pub(super) unsafe fn multiply(&self, b: &Block) {
        debug_assert!(b.runs > 0 && b.run > 0);
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if self.amx {
            // SAFETY: tiles are configured on this thread; the rest is the caller's promise.
            return unsafe { multiply_amx(b) };
        }
        // SAFETY: the caller's promise.
        unsafe { plain(b) };
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if self.amx {
            // SAFETY: tiles are configured on this thread; none is in use.
            unsafe { std::arch::asm!("tilerelease", options(nostack, nomem)) };
        }
    }
}

/// # Safety
/// As [`Tiles::multiply`], on a thread whose tiles are configured.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
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

/// The values of one block in f32, those at even and at odd places apart.
struct Halves {
    /// Of each row.
    left: [[[f32; LANES]; 2]; SIDE],
    /// Of the columns, for each pair of values.
    right: [[[f32; SIDE]; LANES]; 2],
}

/// The values at even and at odd places.
#[inline(always)]
fn apart(pairs: [u32; LANES]) -> [[f32; LANES]; 2] {
    [
        pairs.map(|p| f32::from_bits(p << 16)),
        pairs.map(|p| f32::from_bits(p & 0xffff_0000)),
    ]
}

/// What `multiply_amx` computes, in f32.
#[inline(always)]
unsafe fn plain_body<V: Vector>(b: &Block) {
    let mut sums = [[0.0f32; SIDE]; SIDE];
    let mut own = Halves {
        left: [[[0.0; LANES]; 2]; SIDE],
        right: [[[0.0; SIDE]; LANES]; 2],
    };
    // SAFETY: rows, panels and sums exist, by the promise that `Tiles::multiply` asks for.
    unsafe {
        let row_of_sums = |r: usize| {
            let c = b.c[r / LANES].cast::<u8>();
            c.add(r % LANES * b.c_stride).cast::<[f32; SIDE]>()
        };
        if b.add != 0 {
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = row_of_sums(r).read_unaligned();
            }
        }
        let mut tile = b.b.cast::<[u32; LANES]>();
        for run in 0..b.runs {
            let start = *b.offsets.add(run);
            for block in 0..b.run {
                for (r, left) in own.left.iter_mut().enumerate() {
                    let row = b.a[r / LANES].add(r % LANES * b.a_stride);
                    let from = row.offset(start).cast::<[u32; LANES]>().add(block);
                    *left = apart(from.read_unaligned());
                }
                for k in 0..LANES {
                    for half in 0..2 {
                        let from = tile.byte_add(half * b.b_panel).add(k);
                        for (place, values) in apart(from.read_unaligned()).iter().enumerate() {
                            own.right[place][k][half * LANES..][..LANES].copy_from_slice(values);
                        }
                    }
                }
                if V::SPAN >= 4 {
                    for r in (0..SIDE).step_by(8) {
                        rows::<V, 8, 2>(&own, &mut sums, r, 0);
                    }
                } else {
                    for column in [0, LANES] {
                        // As many sums as sixteen registers hold, so that additions do not wait for each other.
                        for r in [0, 6, 12, 18] {
                            rows::<V, 6, 1>(&own, &mut sums, r, column);
                        }
                        for r in [24, 28] {
                            rows::<V, 4, 1>(&own, &mut sums, r, column);
                        }
                    }
                }
                tile = tile.byte_add(TILE_BYTES);
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            row_of_sums(r).write_unaligned(*sums);
        }
    }
}

/// Adds one block to the sums of `M` rows from `r` on and `N` vectors of columns from `column` on.
#[inline(always)]
unsafe fn rows<V: Vector, const M: usize, const N: usize>(
    own: &Halves,
    sums: &mut [[f32; SIDE]; SIDE],
    r: usize,
    column: usize,
) {
    // SAFETY: these rows and columns exist.
    unsafe {
        let mut chains = [[[V::splat(0.0); N]; M]; 2];
        for (place, chains) in chains.iter_mut().enumerate() {
            for (k, right) in own.right[place].iter().enumerate() {
                let mut columns = [V::splat(0.0); N];
                for (n, v) in columns.iter_mut().enumerate() {
                    *v = V::load(right.as_ptr().add(column + n * LANES));
                }
                for (m, chains) in chains.iter_mut().enumerate() {
                    let v = V::splat(own.left[r + m][place][k]);
                    for (chain, &b) in chains.iter_mut().zip(&columns) {
                        *chain = v.fma(b, *chain);
                    }
                }
            }
        }
        let [even, odd] = chains;
        for (sums, (even, odd)) in sums[r..].iter_mut().zip(even.iter().zip(&odd)) {
            for (n, (&even, &odd)) in even.iter().zip(odd).enumerate() {
                let to = sums.as_mut_ptr().add(column + n * LANES);
                V::load(to).add(even.add(odd)).store(to);
            }
        }
    }
}

vectorised! {
    /// # Safety
    /// As [`Tiles::multiply`].
    unsafe fn plain(b: &Block) = plain_body
}
