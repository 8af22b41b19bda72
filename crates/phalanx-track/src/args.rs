//! The flags of trackers.

use std::path::Path;

use phalanx_base::env::Env;
use phalanx_base::say;

use crate::{Result, Tracker, Wandb, refuse};

/// The flags of trackers, for every training program.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TrackArgs {
    /// Send settings, metrics, results and files to an MLflow tracking server [default URI: MLFLOW_TRACKING_URI]
    #[arg(long, value_name = "URI", num_args = 0..=1, default_missing_value = "")]
    pub mlflow: Option<String>,
    /// Write an offline run into the folder's wandb/, which `wandb sync` uploads; nothing with WANDB_MODE=disabled
    #[arg(long)]
    pub wandb: bool,
    /// Keep a copy of the output folder, checkpoints too, below this URL of an object store while the training runs; with --resume auto and no checkpoint in the folder, continue from the copy
    #[arg(long, value_name = "s3://BUCKET/PREFIX|gs://…")]
    pub output_url: Option<String>,
}

impl TrackArgs {
    /// Checks what was typed, on every rank.
    ///
    /// # Errors
    ///
    /// `Usage`: an address that is none, or that has a password; a program without MLflow.
    pub fn validate(&self) -> Result<()> {
        if let Some(url) = &self.output_url {
            store(url)?;
        }
        match self.mlflow.as_deref() {
            None => Ok(()),
            Some("") if cfg!(feature = "mlflow") => Ok(()),
            Some(uri) => mlflow(Some(uri), &Env::new()).map(drop),
        }
    }

    /// Before a training in `dir`: with `--output-url`, checks that no other run is there, or if the training `resumes` from
    /// a checkpoint that is there, copies that run here. `is_fresh`: what is in `dir` goes. Returns what was copied, in words. On
    /// rank 0.
    ///
    /// # Errors
    ///
    /// `Usage`, where there is another run; those of reading and writing.
    pub fn prepare(&self, dir: &Path, resumes: bool, is_fresh: bool) -> Result<Option<String>> {
        let Some(url) = &self.output_url else {
            return Ok(None);
        };
        #[cfg(feature = "object-store")]
        return crate::store::prepare(url, dir, resumes, is_fresh);
        #[cfg(not(feature = "object-store"))]
        {
            let _ = (dir, resumes, is_fresh);
            store(url).map(|_| None)
        }
    }

    /// As [`trackers`](Self::trackers), and for a run under Kubeflow Trainer the one that posts its progress there.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate).
    pub fn of_run(&self, env: &Env) -> Result<Vec<Box<dyn Tracker + Send>>> {
        let trackers = self.trackers(env)?;
        #[cfg(feature = "mlflow")]
        let trackers = trackers
            .into_iter()
            .chain(crate::kubeflow::of(env))
            .collect();
        Ok(trackers)
    }

    /// The trackers that the flags ask for, with addresses and passwords from `env`.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate); `Usage`, where `--mlflow` has no address and `env` has none either.
    pub fn trackers(&self, env: &Env) -> Result<Vec<Box<dyn Tracker + Send>>> {
        let mut trackers: Vec<Box<dyn Tracker + Send>> = Vec::new();
        let set = |name: &str| env.get(name).filter(|value| !value.is_empty());
        let mode = set("WANDB_MODE").map_or("online", String::as_str);
        if self.wandb && mode != "disabled" {
            if !["offline", "dryrun"].contains(&mode) {
                let key = set("WANDB_API_KEY").map_or(" (WANDB_API_KEY is not set)", |_| "");
                let later = "`wandb sync RUN/wandb/offline-run-*` uploads it";
                say::note(format!("wandb: the run is written offline{key}; {later}"));
            }
            trackers.push(Box::new(Wandb::new(env)));
        }
        if let Some(uri) = self.mlflow.as_deref() {
            let uri = Some(uri).filter(|uri| !uri.is_empty());
            trackers.push(mlflow(uri, env)?);
        }
        if let Some(url) = &self.output_url {
            trackers.push(store(url)?);
        }
        Ok(trackers)
    }
}

/// Whether `url` is one that `--output-url` takes.
pub fn is_object_store(url: &str) -> bool {
    url.starts_with("s3://") || url.starts_with("gs://")
}

/// The copy at `url`.
pub(crate) fn store(url: &str) -> Result<Box<dyn Tracker + Send>> {
    if !is_object_store(url) {
        refuse!("--output-url {url}: give s3://BUCKET/PREFIX or gs://BUCKET/PREFIX");
    }
    #[cfg(feature = "object-store")]
    return Ok(Box::new(crate::RunCopy::new(url)?));
    #[cfg(not(feature = "object-store"))]
    {
        let fix = "build with --features object-store";
        Err(crate::Error::usage("this program was built without object stores").note("fix", fix))
    }
}

/// The MLflow server at `uri`, or where `env` says.
pub(crate) fn mlflow(uri: Option<&str>, env: &Env) -> Result<Box<dyn Tracker + Send>> {
    // It would be seen by all users of the host, and be kept in `run.json`.
    if uri.is_some_and(|uri| uri.contains('@')) {
        refuse!(
            "the address of the MLflow server has a user or password, which other users could read; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        );
    }
    #[cfg(feature = "mlflow")]
    return Ok(Box::new(crate::Mlflow::new(uri, env)?));
    #[cfg(not(feature = "mlflow"))]
    {
        let _ = env;
        let fix = "add features = [\"mlflow\"] to phalanx in its Cargo.toml";
        Err(crate::Error::usage("this program was built without MLflow").note("fix", fix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wandb_follows_its_mode() {
        let trackers = |wandb: bool, mode: &str| {
            let args = TrackArgs {
                wandb,
                ..TrackArgs::default()
            };
            let env = Env::from([("WANDB_MODE".to_owned(), mode.to_owned())]);
            args.trackers(&env).expect(mode).len()
        };
        for (mode, count) in [
            ("", 1),
            ("online", 1),
            ("offline", 1),
            ("dryrun", 1),
            ("disabled", 0),
        ] {
            assert_eq!(
                [trackers(true, mode), trackers(false, mode)],
                [count, 0],
                "{mode}"
            );
        }
    }
}
