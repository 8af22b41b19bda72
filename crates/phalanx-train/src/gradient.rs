//! Data type or compression for gradient exchange.

use phalanx_ddp::{Bf16Gradients, F16Gradients, GradientHook, PowerSgd, PowerSgdOptions};

use crate::choice_name;
use crate::error::{Error, Result, check_count};

/// Data type or compression for gradient exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum GradientType {
    /// Uncompressed, overlapped with backward
    F32,
    /// Half the bytes, 8 bits of precision
    Bf16,
    /// Half the bytes, 11 bits of precision
    F16,
    /// PowerSGD: low-rank approximations of matrices, after --powersgd-start steps
    Powersgd,
}

/// Arguments about gradients between ranks.
#[derive(Debug, Clone, clap::Args)]
pub struct GradientArgs {
    /// Data type or compression for gradient exchange
    #[arg(long, value_enum, default_value_t = GradientType::F32)]
    pub gradient_type: GradientType,
    /// Rank of the approximation for --gradient-type powersgd [default: 2]
    #[arg(long, value_name = "N")]
    pub powersgd_rank: Option<usize>,
    /// Uncompressed steps before --gradient-type powersgd begins [default: 100]
    #[arg(long, value_name = "N")]
    pub powersgd_start: Option<u64>,
}

/// Facts that checkpoints from before 2026-11-22 lack.
pub const RANK_FLAG: &str = "--powersgd-rank";
pub const START_FLAG: &str = "--powersgd-start";

/// Where nothing was typed.
const POWERSGD_RANK: usize = 2;
const POWERSGD_START: u64 = 100;

impl GradientArgs {
    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self) -> Result<()> {
        if self.gradient_type != GradientType::Powersgd {
            let typed = [
                (RANK_FLAG, self.powersgd_rank.is_some()),
                (START_FLAG, self.powersgd_start.is_some()),
            ];
            if let Some((flag, _)) = typed.into_iter().find(|(_, typed)| *typed) {
                return Err(Error::usage(format!(
                    "{flag} is for --gradient-type powersgd; add that, or leave it out"
                )));
            }
        }
        check_count(RANK_FLAG, self.powersgd_rank(), 1024)
    }

    fn powersgd_rank(&self) -> usize {
        self.powersgd_rank.unwrap_or(POWERSGD_RANK)
    }

    fn powersgd_start(&self) -> u64 {
        self.powersgd_start.unwrap_or(POWERSGD_START)
    }

    /// What ranks, and a resumed run with the one that was saved, must share besides the type.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        match self.gradient_type {
            GradientType::Powersgd => vec![
                (RANK_FLAG, self.powersgd_rank().to_string()),
                (START_FLAG, self.powersgd_start().to_string()),
            ],
            _ => Vec::new(),
        }
    }

    /// For the person at the terminal; nothing, where gradients travel as they are.
    pub fn describe(&self) -> Option<String> {
        Some(match self.gradient_type {
            GradientType::F32 => return None,
            GradientType::Bf16 | GradientType::F16 => {
                format!("gradients travel as {}", choice_name(&self.gradient_type))
            }
            GradientType::Powersgd => {
                format!(
                    "gradients travel as PowerSGD of rank {}",
                    self.powersgd_rank()
                )
            }
        })
    }

    /// The hook that sends gradients so; none for float32.
    ///
    /// # Errors
    ///
    /// Usage, when settings are impossible.
    pub fn hook(&self, seed: u64) -> Result<Option<Box<dyn GradientHook>>> {
        Ok(match self.gradient_type {
            GradientType::F32 => None,
            GradientType::Bf16 => Some(Box::new(Bf16Gradients::default())),
            GradientType::F16 => Some(Box::new(F16Gradients::default())),
            GradientType::Powersgd => Some(Box::new(PowerSgd::new(PowerSgdOptions {
                rank: self.powersgd_rank(),
                start_step: self.powersgd_start(),
                seed,
                ..PowerSgdOptions::default()
            })?)),
        })
    }
}
