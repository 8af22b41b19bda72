//! Data type or compression for gradient exchange.

use std::fmt;
use std::str::FromStr;

use phalanx_ddp::{Bf16Gradients, F16Gradients, GradientHook, PowerSgd, PowerSgdOptions};

use crate::error::Result;

/// Data type or compression for gradient exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientType {
    /// Uncompressed, overlapped with backward.
    F32,
    /// Half the bytes, 8 bits of precision.
    Bf16,
    /// Half the bytes, 11 bits of precision.
    F16,
    /// PowerSGD: low-rank approximations of matrices.
    Powersgd {
        /// Rank of the approximation.
        rank: usize,
        /// Uncompressed steps before the first compressed one.
        start: u64,
    },
}

impl FromStr for GradientType {
    type Err = String;

    fn from_str(typed: &str) -> std::result::Result<GradientType, String> {
        let parts: Vec<&str> = typed.split(':').collect();
        let (rank, start) = match parts[..] {
            ["f32"] => return Ok(GradientType::F32),
            ["bf16"] => return Ok(GradientType::Bf16),
            ["f16"] => return Ok(GradientType::F16),
            ["powersgd"] => ("2", "100"),
            ["powersgd", rank] => (rank, "100"),
            ["powersgd", rank, start] => (rank, start),
            _ => return Err("write f32, bf16, f16 or powersgd[:RANK[:START]]".to_owned()),
        };
        match (rank.parse(), start.parse()) {
            (Ok(rank @ 1..=1024), Ok(start)) => Ok(GradientType::Powersgd { rank, start }),
            _ => Err(
                "RANK must be from 1 to 1024 and START a number of steps, as in powersgd:4:100"
                    .to_owned(),
            ),
        }
    }
}

impl fmt::Display for GradientType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GradientType::F32 => f.write_str("f32"),
            GradientType::Bf16 => f.write_str("bf16"),
            GradientType::F16 => f.write_str("f16"),
            GradientType::Powersgd { rank, start } => write!(f, "powersgd:{rank}:{start}"),
        }
    }
}

impl GradientType {
    /// For the person at the terminal; nothing, where gradients travel as they are.
    pub fn describe(&self) -> Option<String> {
        match self {
            GradientType::F32 => None,
            GradientType::Powersgd { rank, .. } => {
                Some(format!("gradients travel as PowerSGD of rank {rank}"))
            }
            _ => Some(format!("gradients travel as {self}")),
        }
    }

    /// The hook that sends gradients so; none for float32.
    ///
    /// # Errors
    ///
    /// Usage, when settings are impossible.
    pub fn hook(&self, seed: u64) -> Result<Option<Box<dyn GradientHook>>> {
        Ok(match *self {
            GradientType::F32 => None,
            GradientType::Bf16 => Some(Box::new(Bf16Gradients::default())),
            GradientType::F16 => Some(Box::new(F16Gradients::default())),
            GradientType::Powersgd { rank, start } => {
                Some(Box::new(PowerSgd::new(PowerSgdOptions {
                    rank,
                    start_step: start,
                    seed,
                    ..PowerSgdOptions::default()
                })?))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powersgd_is_typed_with_its_rank_and_start() {
        for (typed, shown) in [
            ("f32", "f32"),
            ("bf16", "bf16"),
            ("powersgd", "powersgd:2:100"),
            ("powersgd:4", "powersgd:4:100"),
            ("powersgd:4:0", "powersgd:4:0"),
        ] {
            let parsed = typed.parse::<GradientType>().expect(typed);
            assert_eq!(parsed.to_string(), shown);
            assert_eq!(shown.parse(), Ok(parsed));
        }
        for wrong in ["", "f64", "bf16:2", "powersgd:1:2:3"] {
            let error = wrong.parse::<GradientType>().expect_err(wrong);
            assert!(error.starts_with("write f32"), "{error}");
        }
        for wrong in ["powersgd:", "powersgd:0", "powersgd:1025", "powersgd:2:x"] {
            let error = wrong.parse::<GradientType>().expect_err(wrong);
            assert!(error.starts_with("RANK must be"), "{error}");
        }
    }
}
