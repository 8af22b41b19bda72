//! The flags of trackers.

use phalanx_base::env::Env;

use crate::{Result, Tracker, Wandb};

/// The flags of trackers, for every training program.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TrackArgs {
    /// Send settings, metrics, results and files to an MLflow tracking server [default URI: MLFLOW_TRACKING_URI]
    #[arg(long, value_name = "URI", num_args = 0..=1, default_missing_value = "")]
    pub mlflow: Option<String>,
    /// Write an offline run into the folder's wandb/, which `wandb sync` uploads
    #[arg(long)]
    pub wandb: bool,
}

impl TrackArgs {
    /// Checks what was typed, on every rank.
    ///
    /// # Errors
    ///
    /// `Usage`: an address that is none, or that has a password; a program without MLflow.
    pub fn validate(&self) -> Result<()> {
        match self.mlflow.as_deref() {
            None => Ok(()),
            Some("") => mlflow::check(),
            Some(uri) => mlflow::of(Some(uri), &Env::new()).map(|_| ()),
        }
    }

    /// As [`trackers`](Self::trackers), and for a run under Kubeflow Trainer the one that posts its progress there.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate).
    pub fn of_run(&self, env: &Env) -> Result<Vec<Box<dyn Tracker + Send>>> {
        let mut trackers = self.trackers(env)?;
        #[cfg(feature = "mlflow")]
        trackers.extend(crate::kubeflow::of(env));
        Ok(trackers)
    }

    /// The trackers that the flags ask for, with addresses and passwords from `env`.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate); `Usage`, where `--mlflow` has no address and `env` has none either.
    pub fn trackers(&self, env: &Env) -> Result<Vec<Box<dyn Tracker + Send>>> {
        let mut trackers: Vec<Box<dyn Tracker + Send>> = Vec::new();
        if self.wandb {
            trackers.push(Box::new(Wandb::new(env)));
        }
        if let Some(uri) = self.mlflow.as_deref() {
            let uri = Some(uri).filter(|uri| !uri.is_empty());
            trackers.push(mlflow::of(uri, env)?);
        }
        Ok(trackers)
    }
}

#[cfg(feature = "mlflow")]
pub(crate) mod mlflow {
    use phalanx_base::env::Env;

    use crate::{Error, Mlflow, Result, Tracker};

    pub(super) fn check() -> Result<()> {
        Ok(())
    }

    pub(crate) fn of(uri: Option<&str>, env: &Env) -> Result<Box<dyn Tracker + Send>> {
        // It would be seen by all users of the host, and be kept in `run.json`.
        if uri.is_some_and(|uri| uri.contains('@')) {
            return Err(Error::usage(
                "the address of the MLflow server has a user or password, which other users could read; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            ));
        }
        Ok(Box::new(Mlflow::new(uri, env)?))
    }
}

#[cfg(not(feature = "mlflow"))]
pub(crate) mod mlflow {
    use phalanx_base::env::Env;

    use crate::{Error, Result, Tracker};

    fn absent() -> Error {
        Error::usage("this program was built without MLflow").note(
            "fix",
            "add features = [\"mlflow\"] to phalanx in its Cargo.toml",
        )
    }

    pub(super) fn check() -> Result<()> {
        Err(absent())
    }

    pub(crate) fn of(_: Option<&str>, _: &Env) -> Result<Box<dyn Tracker + Send>> {
        Err(absent())
    }
}
