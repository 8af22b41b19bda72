//! As what gradients travel between ranks.

use phalanx_ddp::{Bf16Gradients, F16Gradients, GradientHook, PowerSgd, PowerSgdOptions};

use crate::error::Result;
use crate::ranks;

/// As what gradients travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum GradientType {
    /// As they are, while backward still runs
    F32,
    /// Half the bytes, 8 bits of precision
    Bf16,
    /// Half the bytes, 11 bits of precision
    F16,
    /// Matrices as products of two thin ones, after --powersgd-start steps
    Powersgd,
}

/// Arguments about gradients between ranks.
#[derive(Debug, Clone, clap::Args)]
pub struct GradientArgs {
    /// As what gradients travel between ranks
    #[arg(long, value_enum, default_value_t = GradientType::F32)]
    pub gradient_type: GradientType,
    /// Columns of the thin matrices of --gradient-type powersgd
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub powersgd_rank: usize,
    /// Steps with plain means before --gradient-type powersgd begins
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub powersgd_start: u64,
}

impl GradientArgs {
    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self) -> Result<()> {
        ranks::check_count("--powersgd-rank", self.powersgd_rank, 1024)
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
                rank: self.powersgd_rank,
                start_step: self.powersgd_start,
                seed,
                ..PowerSgdOptions::default()
            })?)),
        })
    }
}
