//! The shapes of the ten digits.
//!
//! Coordinates: x to the right, y down, both about 0 to 1 in the digit's box.

/// A stroke: straight lines between the points, or a curve through them.
pub(super) struct Stroke {
    pub(super) smooth: bool,
    /// x and y of each point in turn.
    pub(super) points: &'static [f32],
}

/// A style of a digit.
pub(super) type Glyph = &'static [Stroke];

const fn straight(points: &'static [f32]) -> Stroke {
    Stroke {
        smooth: false,
        points,
    }
}

const fn smooth(points: &'static [f32]) -> Stroke {
    Stroke {
        smooth: true,
        points,
    }
}

/// Styles of each digit; a sample has one of them.
pub(super) const GLYPHS: [&[Glyph]; 10] = [
    &[ZERO],
    &[ONE_BAR, ONE_FLAG, ONE_FOOT],
    &[TWO_FLAT, TWO_LOOP],
    &[THREE_ROUND, THREE_FLAT],
    &[FOUR_OPEN, FOUR_CLOSED],
    &[FIVE],
    &[SIX],
    &[SEVEN, SEVEN_BARRED, SEVEN_SERIF],
    &[EIGHT],
    &[NINE_ROUND, NINE_STRAIGHT],
];

const ZERO: Glyph = &[smooth(&[
    0.50, 0.02, 0.80, 0.20, 0.85, 0.50, 0.78, 0.82, 0.50, 0.98, 0.20, 0.82, 0.15, 0.50, 0.22, 0.18,
    0.52, 0.03,
])];

const ONE_BAR: Glyph = &[straight(&[0.50, 0.00, 0.50, 0.50, 0.50, 1.00])];

const ONE_FLAG: Glyph = &[straight(&[0.30, 0.22, 0.54, 0.02, 0.54, 0.50, 0.54, 1.00])];

const ONE_FOOT: Glyph = &[
    straight(&[0.28, 0.24, 0.52, 0.02, 0.52, 0.98]),
    straight(&[0.22, 0.98, 0.82, 0.98]),
];

const TWO_FLAT: Glyph = &[
    smooth(&[
        0.18, 0.25, 0.32, 0.05, 0.60, 0.02, 0.80, 0.20, 0.72, 0.45, 0.45, 0.72, 0.15, 0.97,
    ]),
    straight(&[0.15, 0.97, 0.86, 0.96]),
];

const TWO_LOOP: Glyph = &[smooth(&[
    0.20, 0.20, 0.50, 0.00, 0.78, 0.22, 0.60, 0.60, 0.30, 0.92, 0.15, 0.85, 0.30, 0.76, 0.60, 0.93,
    0.90, 0.90,
])];

const LOWER_THREE: Stroke = smooth(&[
    0.42, 0.46, 0.70, 0.53, 0.84, 0.74, 0.62, 0.97, 0.30, 0.98, 0.13, 0.82,
]);

const THREE_ROUND: Glyph = &[
    smooth(&[0.18, 0.14, 0.48, 0.00, 0.78, 0.18, 0.64, 0.42, 0.42, 0.46]),
    LOWER_THREE,
];

const THREE_FLAT: Glyph = &[straight(&[0.16, 0.03, 0.80, 0.03, 0.42, 0.46]), LOWER_THREE];

const FOUR_OPEN: Glyph = &[
    straight(&[0.30, 0.00, 0.14, 0.55, 0.88, 0.55]),
    straight(&[0.68, 0.18, 0.62, 1.00]),
];

const FOUR_CLOSED: Glyph = &[straight(&[0.66, 1.00, 0.66, 0.00, 0.12, 0.68, 0.92, 0.68])];

const FIVE: Glyph = &[
    straight(&[0.82, 0.03, 0.28, 0.03, 0.24, 0.45]),
    smooth(&[
        0.24, 0.45, 0.50, 0.36, 0.80, 0.52, 0.80, 0.82, 0.50, 0.98, 0.15, 0.88,
    ]),
];

const SIX: Glyph = &[smooth(&[
    0.72, 0.04, 0.42, 0.20, 0.22, 0.55, 0.25, 0.85, 0.50, 0.98, 0.76, 0.85, 0.74, 0.60, 0.50, 0.50,
    0.26, 0.68,
])];

const SEVEN: Glyph = &[straight(&[0.15, 0.05, 0.85, 0.05, 0.58, 0.55, 0.42, 1.00])];

const SEVEN_BARRED: Glyph = &[
    straight(&[0.15, 0.05, 0.85, 0.05, 0.42, 1.00]),
    straight(&[0.36, 0.50, 0.80, 0.50]),
];

const SEVEN_SERIF: Glyph = &[straight(&[0.16, 0.22, 0.18, 0.05, 0.84, 0.05, 0.46, 1.00])];

const EIGHT: Glyph = &[smooth(&[
    0.50, 0.48, 0.25, 0.30, 0.30, 0.08, 0.55, 0.00, 0.76, 0.15, 0.70, 0.35, 0.50, 0.48, 0.24, 0.68,
    0.22, 0.88, 0.50, 1.00, 0.78, 0.88, 0.76, 0.66, 0.50, 0.48,
])];

const NINE_ROUND: Glyph = &[smooth(&[
    0.76, 0.28, 0.60, 0.50, 0.32, 0.48, 0.20, 0.26, 0.35, 0.04, 0.62, 0.02, 0.77, 0.24, 0.76, 0.60,
    0.64, 1.00,
])];

const NINE_STRAIGHT: Glyph = &[
    smooth(&[
        0.74, 0.26, 0.56, 0.50, 0.28, 0.46, 0.20, 0.22, 0.42, 0.02, 0.68, 0.08, 0.74, 0.26,
    ]),
    straight(&[0.75, 0.10, 0.74, 0.55, 0.72, 1.00]),
];
