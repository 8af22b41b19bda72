//! Plans already built. Training repeats a few shapes for hours.

use std::sync::Arc;

use super::flow::Schedule;
use crate::plan::{Hosts, RankPlan, Spec, build_on};
use crate::{Error, Result};

/// Shapes remembered; a model has at most a few dozen buckets.
const MAX_PLANS: usize = 256;

/// A plan and how it is run.
pub(super) struct Prepared {
    pub(super) plan: RankPlan,
    pub(super) schedule: Schedule,
}

impl Prepared {
    /// A plan for `what`, checked for memory safety, with the schedule that
    /// `prepare` makes of it.
    pub(super) fn new(
        plan: RankPlan,
        what: &impl std::fmt::Debug,
        prepare: impl FnOnce(&RankPlan) -> Schedule,
    ) -> Result<Self> {
        plan.check_local()
            .map_err(|e| Error::internal(format!("wrong plan for {what:?}: {e}")).with_source(e))?;
        let schedule = prepare(&plan);
        Ok(Prepared { plan, schedule })
    }
}

/// The plans of one rank, found by what they are for.
pub(super) struct PlanCache {
    rank: usize,
    hosts: Hosts,
    /// Looked up by hash, never iterated.
    plans: std::collections::HashMap<Spec, Arc<Prepared>>,
}

impl PlanCache {
    pub(super) fn new(rank: usize, hosts: Hosts) -> Self {
        PlanCache {
            rank,
            hosts,
            plans: std::collections::HashMap::new(),
        }
    }

    /// The plan for `spec`, checked for memory safety when it is built, with
    /// the schedule that `prepare` makes of it.
    pub(super) fn get(
        &mut self,
        spec: &Spec,
        prepare: impl FnOnce(&RankPlan) -> Schedule,
    ) -> Result<Arc<Prepared>> {
        if let Some(plan) = self.plans.get(spec) {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(Prepared::new(
            build_on(spec, &self.hosts, self.rank),
            spec,
            prepare,
        )?);
        // A caller with ever new shapes must not fill the memory.
        if self.plans.len() >= MAX_PLANS {
            self.plans.clear();
        }
        self.plans.insert(*spec, Arc::clone(&plan));
        Ok(plan)
    }
}
