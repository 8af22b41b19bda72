//! The layouts that an operation takes, and the layout of its result.
//!
//! A rule is for one mesh dimension: the SBP of each operand, and the one of the result. An
//! operation on a mesh of two dimensions takes one rule for each. If the operands fit rules as they are, the operation
//! runs without communication. Otherwise they are converted for the rules whose conversions (and, for a
//! partial result, whose fold) take least predicted time.

use std::fmt::Write as _;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::layout::{Cuts, Layout};
use crate::sbp::{self, Fold, Sbp};

/// What an operation takes and makes in one mesh dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// Of each operand.
    pub(crate) takes: Vec<Sbp>,
    pub(crate) makes: Sbp,
    /// Split axes of one name have equal ranges.
    name: usize,
    /// The ranges, if the operation prescribes them.
    cuts: Option<Cuts>,
}

/// The name of a rule that splits nothing.
const NONE: usize = usize::MAX;

impl Rule {
    /// All operands whole.
    pub(crate) fn whole(operands: usize) -> Self {
        Rule {
            takes: vec![Sbp::Broadcast; operands],
            makes: Sbp::Broadcast,
            name: NONE,
            cuts: None,
        }
    }

    /// An operation that is linear in operand `which` alone: partial, while the others are whole
    /// or, if they are `added` to the result, partial.
    pub(crate) fn partial(operands: usize, which: usize, added: &[usize]) -> Self {
        let mut rule = Self::whole(operands);
        for i in added.iter().copied().chain([which]) {
            rule.takes[i] = Sbp::partial_sum();
        }
        rule.makes = Sbp::partial_sum();
        rule
    }

    /// Operands split along these axes (`None`: whole), so that the result is `makes`. Axes of rules
    /// of one `name` are the same.
    pub(crate) fn split(name: usize, takes: &[Option<usize>], makes: Sbp) -> Self {
        let of = |axis: &Option<usize>| axis.map_or(Sbp::Broadcast, Sbp::Split);
        Rule {
            takes: takes.iter().map(of).collect(),
            makes,
            name,
            cuts: None,
        }
    }

    /// With an operand that is added to a partial result.
    pub(crate) fn adding(mut self, operand: usize) -> Self {
        self.takes[operand] = Sbp::partial_sum();
        self
    }

    /// With ranges prescribed.
    pub(crate) fn cut(mut self, cuts: Option<Cuts>) -> Self {
        self.cuts = cuts;
        self
    }
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} -> {}", sbp::list(&self.takes), self.makes)
    }
}

/// What was decided for an operation.
#[derive(Clone, Debug)]
pub(crate) struct Decision {
    /// The layout that each operand must have.
    pub(crate) takes: Vec<Layout>,
    /// SBP of the result.
    pub(crate) makes: Vec<Sbp>,
    /// Ranges of split axes, by name of the rule.
    cuts: Vec<(usize, Cuts)>,
    /// The name of the rule of each mesh dimension.
    names: Vec<usize>,
}

impl Decision {
    /// The layout of a result of that shape whose split axes have the ranges of the operands'.
    pub(crate) fn result(&self, mesh: &[usize], shape: &[usize]) -> Result<Layout> {
        self.result_with(mesh, shape, |_, cuts| cuts)
    }

    /// The same with other ranges: what `change` makes of those of an axis of the result.
    pub(crate) fn result_with(
        &self,
        mesh: &[usize],
        shape: &[usize],
        change: impl Fn(usize, Cuts) -> Cuts,
    ) -> Result<Layout> {
        Layout::cut_by(mesh, shape, &self.makes, |axis| {
            let dim = (0..self.makes.len()).find(|d| self.makes[*d] == Sbp::Split(axis))?;
            let found = self.cuts.iter().find(|c| c.0 == self.names[dim])?;
            Some(change(axis, found.1.clone()))
        })
    }
}

/// Takes one of `rules` for each mesh dimension. `shape` is the result's, `price` gives the seconds that a conversion takes.
///
/// # Errors
/// `Usage` when an operand is a minimum or maximum that its rule does not take, or, if conversions are
/// not `automatic`, when one is needed; the message has the operands and the rules.
pub(crate) fn decide(
    operation: &str,
    operands: &[&Layout],
    rules: &[Rule],
    shape: &[usize],
    automatic: bool,
    price: &dyn Fn(&Layout, &Layout) -> Result<f64>,
) -> Result<Decision> {
    let mesh = operands[0].mesh();
    // As it is: the first rule that fits in each dimension.
    let fitting = |dim: usize| {
        rules.iter().find(|rule| {
            operands
                .iter()
                .zip(&rule.takes)
                .all(|(o, takes)| o.sbp()[dim] == *takes)
        })
    };
    let direct: Option<Vec<&Rule>> = (0..mesh.len()).map(fitting).collect();
    if let Some(chosen) = direct
        && let Some(decision) = apply(operands, &chosen)
        && decision.takes.iter().zip(operands).all(|(t, o)| t == *o)
    {
        return Ok(decision);
    }
    let is_extreme = |s: &Sbp| matches!(s, Sbp::Partial(Fold::Min | Fold::Max));
    let extreme = operands.iter().any(|o| o.sbp().iter().any(is_extreme));
    if extreme || !automatic {
        return Err(refused(operation, operands, rules, extreme));
    }
    let mut best: Option<(f64, Decision)> = None;
    let choices = rules.len().pow(mesh.len() as u32);
    for code in 0..choices {
        let chosen: Vec<&Rule> = (0..mesh.len())
            .map(|d| &rules[code / rules.len().pow(d as u32) % rules.len()])
            .collect();
        let Some(decision) = apply(operands, &chosen) else {
            continue;
        };
        let mut seconds = 0.0;
        for (operand, takes) in operands.iter().zip(&decision.takes) {
            seconds += price(operand, takes)?;
        }
        if decision.makes.iter().any(|s| s.is_partial()) {
            // The ranges of the result are not known here: an operation may change the operands'.
            let made = Layout::even(mesh, shape, &decision.makes)?;
            let folded: Vec<Sbp> = made
                .sbp()
                .iter()
                .map(|s| if s.is_partial() { Sbp::Broadcast } else { *s })
                .collect();
            seconds += price(&made, &made.with_sbp(&folded)?)?;
        }
        if best.as_ref().is_none_or(|b| seconds < b.0) {
            best = Some((seconds, decision));
        }
    }
    best.map(|b| b.1)
        .ok_or_else(|| refused(operation, operands, rules, false))
}

/// The layouts that operands must have under one rule a mesh dimension; `None` where the rules do
/// not go together.
fn apply(operands: &[&Layout], chosen: &[&Rule]) -> Option<Decision> {
    let mesh = operands[0].mesh();
    let names: Vec<usize> = chosen.iter().map(|rule| rule.name).collect();
    let mut cuts: Vec<(usize, Cuts)> = Vec::new();
    for rule in chosen {
        if rule.name == NONE || cuts.iter().any(|c| c.0 == rule.name) {
            continue;
        }
        // Ranges that an operand has already; all mesh dimensions of this name split the axis.
        let dims: Vec<usize> = (0..names.len())
            .filter(|d| names[*d] == rule.name)
            .collect();
        let axes = operands
            .iter()
            .zip(&rule.takes)
            .filter_map(|(o, s)| match s {
                Sbp::Split(axis) => Some((*o, *axis)),
                _ => None,
            });
        let mut length = 0;
        let mut have = rule.cuts.clone();
        for (operand, axis) in axes {
            length = operand.shape()[axis];
            let own: Vec<usize> = operand.dims_of(axis).collect();
            if own == dims && have.is_none() {
                have = operand.shared_cuts(axis);
            }
        }
        let have = match have {
            Some(have) => have,
            None => {
                let mut all = vec![0, length];
                for d in &dims {
                    all = crate::layout::refine(&all, mesh[*d]);
                }
                all.into()
            }
        };
        cuts.push((rule.name, have));
    }
    let mut takes = Vec::with_capacity(operands.len());
    for (i, operand) in operands.iter().enumerate() {
        let sbp: Vec<Sbp> = chosen.iter().map(|rule| rule.takes[i]).collect();
        // One axis may have two names only if the names are split by different dimensions.
        let named = |axis: usize| {
            let mut of = (0..sbp.len()).filter(|d| sbp[*d] == Sbp::Split(axis));
            let first = names[of.next()?];
            of.all(|d| names[d] == first).then_some(first)
        };
        let mut fits = true;
        let layout = Layout::cut_by(mesh, operand.shape(), &sbp, |axis| {
            let name = named(axis);
            fits &= name.is_some();
            cuts.iter()
                .find(|c| Some(c.0) == name)
                .map(|c| Arc::clone(&c.1))
        });
        takes.push(layout.ok().filter(|_| fits)?);
    }
    Some(Decision {
        takes,
        makes: chosen.iter().map(|rule| rule.makes).collect(),
        cuts,
        names,
    })
}

/// The layout, and the ranges that are not even.
fn with_ranges(layout: &Layout) -> String {
    let mut text = layout.to_string();
    let even = Layout::even(layout.mesh(), layout.shape(), layout.sbp()).ok();
    for axis in 0..layout.shape().len() {
        if let Some(cuts) = layout.cuts(axis)
            && even.as_ref().and_then(|e| e.cuts(axis)) != Some(cuts)
        {
            let _ = write!(text, " with axis {axis} cut at {cuts:?}");
        }
    }
    text
}

fn refused(operation: &str, operands: &[&Layout], rules: &[Rule], extreme: bool) -> Error {
    let given: Vec<String> = operands.iter().map(|o| with_ranges(o)).collect();
    let mut message = format!("{operation} of {}: ", given.join(" and "));
    message.push_str(match extreme {
        true => "a minimum or maximum over ranks must be converted first, with to_global",
        false => "a conversion is needed, and automatic ones are off; convert with to_global",
    });
    let _ = write!(message, ". In each mesh dimension it takes");
    let mut shown: Vec<String> = Vec::new();
    for rule in rules {
        let text = rule.to_string();
        if !shown.contains(&text) {
            shown.push(text);
        }
    }
    let _ = write!(message, " {}", shown.join(", "));
    Error::usage(message)
}
