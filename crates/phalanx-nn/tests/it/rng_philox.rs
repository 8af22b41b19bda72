//! Philox4x32-10 against the known-answer vectors of Random123
//! (`tests/kat_vectors` of that library).

use phalanx_nn::rng::philox::{philox4x32_10, unit_f32};

#[test]
fn known_answers_of_random123() {
    assert_eq!(
        philox4x32_10([0; 4], [0; 2]),
        [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
    );
    assert_eq!(
        philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
        [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
    );
    assert_eq!(
        philox4x32_10(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0]
        ),
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
    );
}

#[test]
fn floats_stay_below_one() {
    assert_eq!(unit_f32(0), 0.0);
    assert_eq!(unit_f32(0x8000_0000), 0.5);
    assert_eq!(unit_f32(u32::MAX), 1.0 - 2.0_f32.powi(-24));
}
