//! The transforms of F(4x4, 3x3) on the points 0, ±√½, ±√2, ∞.
//!
//! Even and odd powers separate (the points come in pairs), and the set is
//! closed under inversion: this halves the error of the usual 0, ±1, ±2, ∞.

use std::f32::consts::{FRAC_1_SQRT_2, SQRT_2};

use crate::vector::Vector;

/// Side of a tile's input (and of its transform).
pub(super) const SIDE: usize = 6;
/// Side of a tile's output.
pub(super) const STEP: usize = 4;
/// Positions of the transform.
pub(super) const POSITIONS: usize = SIDE * SIDE;

/// Weights at ±√½: divided by the product of differences to the other points, -3/2.
const NEAR: f32 = -2.0 / 3.0;
/// Weights at ±√2: divided by 6.
const FAR: f32 = 1.0 / 6.0;

/// Input: six values to six.
#[inline(always)]
unsafe fn input<V: Vector>(d: [V; 6]) -> [V; 6] {
    // SAFETY: the caller runs where V may.
    unsafe {
        let s = |v: f32| V::splat(v);
        let near = (d[2].fma(s(-2.0), d[4]), d[1].fma(s(-2.0), d[3]));
        let far = (d[2].fma(s(-0.5), d[4]), d[1].fma(s(-0.5), d[3]));
        [
            d[2].fma(s(-2.5), d[0].add(d[4])),
            near.1.fma(s(FRAC_1_SQRT_2), near.0),
            near.1.fma(s(-FRAC_1_SQRT_2), near.0),
            far.1.fma(s(SQRT_2), far.0),
            far.1.fma(s(-SQRT_2), far.0),
            d[3].fma(s(-2.5), d[1].add(d[5])),
        ]
    }
}

/// Output: six values to four.
#[inline(always)]
unsafe fn output<V: Vector>(m: [V; 6]) -> [V; 4] {
    // SAFETY: the caller runs where V may.
    unsafe {
        let s = |v: f32| V::splat(v);
        let (even_near, odd_near) = (m[1].add(m[2]), m[1].sub(m[2]));
        let (even_far, odd_far) = (m[3].add(m[4]), m[3].sub(m[4]));
        [
            m[0].add(even_near).add(even_far),
            odd_near.fma(s(FRAC_1_SQRT_2), odd_far.mul(s(SQRT_2))),
            even_near.fma(s(0.5), even_far.mul(s(2.0))),
            odd_far.fma(s(2.0 * SQRT_2), odd_near.fma(s(0.5 * FRAC_1_SQRT_2), m[5])),
        ]
    }
}

/// Output gradient: four values to six (the output transform transposed).
#[inline(always)]
unsafe fn gradient<V: Vector>(y: [V; 4]) -> [V; 6] {
    // SAFETY: the caller runs where V may.
    unsafe {
        let s = |v: f32| V::splat(v);
        let near = (y[2].fma(s(0.5), y[0]), y[3].fma(s(0.5), y[1]));
        let far = (y[2].fma(s(2.0), y[0]), y[3].fma(s(2.0), y[1]));
        [
            y[0],
            near.1.fma(s(FRAC_1_SQRT_2), near.0),
            near.1.fma(s(-FRAC_1_SQRT_2), near.0),
            far.1.fma(s(SQRT_2), far.0),
            far.1.fma(s(-SQRT_2), far.0),
            y[3],
        ]
    }
}

/// Weights: three values to six.
#[inline(always)]
unsafe fn weight<V: Vector>(g: [V; 3]) -> [V; 6] {
    // SAFETY: the caller runs where V may.
    unsafe {
        let s = |v: f32| V::splat(v);
        let near = g[2].fma(s(0.5), g[0]).mul(s(NEAR));
        let far = g[2].fma(s(2.0), g[0]).mul(s(FAR));
        [
            g[0],
            g[1].fma(s(NEAR * FRAC_1_SQRT_2), near),
            g[1].fma(s(-NEAR * FRAC_1_SQRT_2), near),
            g[1].fma(s(FAR * SQRT_2), far),
            g[1].fma(s(-FAR * SQRT_2), far),
            g[2],
        ]
    }
}

/// Weight gradient: six values to three (the weight transform transposed).
#[inline(always)]
unsafe fn weight_gradient<V: Vector>(u: [V; 6]) -> [V; 3] {
    // SAFETY: the caller runs where V may.
    unsafe {
        let s = |v: f32| V::splat(v);
        let (even_near, odd_near) = (u[1].add(u[2]), u[1].sub(u[2]));
        let (even_far, odd_far) = (u[3].add(u[4]), u[3].sub(u[4]));
        [
            even_far.fma(s(FAR), even_near.fma(s(NEAR), u[0])),
            odd_far.fma(s(FAR * SQRT_2), odd_near.mul(s(NEAR * FRAC_1_SQRT_2))),
            even_far.fma(s(2.0 * FAR), even_near.fma(s(0.5 * NEAR), u[5])),
        ]
    }
}

// Squares are written out: an array that a loop fills goes through memory.

/// `$one` of `$get(0, $j)`, `$get(1, $j)` and so on.
macro_rules! line {
    ($one:ident, $get:ident, 3, $j:literal) => {
        $one([$get(0, $j), $get(1, $j), $get(2, $j)])
    };
    ($one:ident, $get:ident, 4, $j:literal) => {
        $one([$get(0, $j), $get(1, $j), $get(2, $j), $get(3, $j)])
    };
    ($one:ident, $get:ident, 6, $j:literal) => {
        $one([
            $get(0, $j),
            $get(1, $j),
            $get(2, $j),
            $get(3, $j),
            $get(4, $j),
            $get(5, $j),
        ])
    };
}

/// All lines of a square of `$a` x `$b` values, as an array.
macro_rules! lines {
    ($one:ident, $get:ident, $a:tt, 3) => {
        [
            line!($one, $get, $a, 0),
            line!($one, $get, $a, 1),
            line!($one, $get, $a, 2),
        ]
    };
    ($one:ident, $get:ident, $a:tt, 4) => {
        [
            line!($one, $get, $a, 0),
            line!($one, $get, $a, 1),
            line!($one, $get, $a, 2),
            line!($one, $get, $a, 3),
        ]
    };
    ($one:ident, $get:ident, $a:tt, 6) => {
        [
            line!($one, $get, $a, 0),
            line!($one, $get, $a, 1),
            line!($one, $get, $a, 2),
            line!($one, $get, $a, 3),
            line!($one, $get, $a, 4),
            line!($one, $get, $a, 5),
        ]
    };
}

/// Applies a transform to columns, then to rows: `A` x `A` values to `B` x `B`.
macro_rules! both_ways {
    ($(#[$meta:meta])* $name:ident = $one:ident, $a:tt to $b:tt) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// Runs where `V` may; `load` and `store` are called with (row, column)
        /// inside the two squares.
        #[inline(always)]
        pub(super) unsafe fn $name<V: Vector>(
            load: impl Fn(usize, usize) -> V,
            mut store: impl FnMut(usize, usize, V),
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                let columns: [[V; $b]; $a] = lines!($one, load, $a, $a);
                let half = |j: usize, i: usize| columns[j][i];
                let rows: [[V; $b]; $b] = lines!($one, half, $a, $b);
                for (i, row) in rows.into_iter().enumerate() {
                    for (j, v) in row.into_iter().enumerate() {
                        store(i, j, v);
                    }
                }
            }
        }
    };
}

both_ways! {
    /// Tile of the input.
    input_tile = input, 6 to 6
}
both_ways! {
    /// Tile of the output.
    output_tile = output, 6 to 4
}
both_ways! {
    /// Tile of the output's gradient.
    gradient_tile = gradient, 4 to 6
}
both_ways! {
    /// A kernel.
    weight_tile = weight, 3 to 6
}
both_ways! {
    /// A kernel's gradient.
    weight_gradient_tile = weight_gradient, 6 to 3
}
