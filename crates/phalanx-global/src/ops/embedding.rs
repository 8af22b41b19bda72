//! Rows of a table by their numbers.

use std::rc::Rc;

use phalanx_nn::{ParamId, Result, Tensor, ValueStep};

use super::product::{tensor, zeros_of};
use super::{INPUTS, OUTPUTS};
use crate::error::refuse;
use crate::indices::Indices;
use crate::layout::Layout;
use crate::rules::{self, Rule};
use crate::sbp::Sbp;
use crate::step::GlobalStep;
use crate::tensor::{Global, is_gathered, weight};

impl<'s, 'a: 's> ValueStep<'s> for &'s GlobalStep<'a> {
    type Value = Global<'s>;
    type Tokens = Indices;

    fn embedding(
        self,
        weight: ParamId,
        tokens: &Indices,
        shape: &[usize],
        padding: Option<u32>,
    ) -> Result<Global<'s>> {
        if tokens.layout().shape() != shape {
            return refuse(format!(
                "embedding: numbers of shape {:?} for shape {shape:?}",
                tokens.layout().shape()
            ));
        }
        rows_of(self, weight, tokens, padding)
    }

    fn constant_embedding(
        self,
        weight: ParamId,
        indices: &[u32],
        shape: &[usize],
    ) -> Result<Global<'s>> {
        let whole = vec![Sbp::Broadcast; self.placement().sizes().len()];
        let indices = self.indices(indices, shape, &whole)?;
        rows_of(self, weight, &indices, None)
    }
}

/// Rows of a table. Tokens may be split (each rank looks up its own), the width (each rank has a range of every row), or the
/// rows: then each rank contributes those that it has, and the result is a sum.
fn rows_of<'s>(
    step: &'s GlobalStep<'s>,
    id: ParamId,
    tokens: &Indices,
    padding: Option<u32>,
) -> Result<Global<'s>> {
    let table = Rc::clone(step.params().used_layout(id)?);
    let &[rows, width] = table.shape() else {
        return refuse(format!("embedding of a table of shape {:?}", table.shape()));
    };
    let own = tokens.layout().shape();
    if let Some(token) = tokens.local().iter().find(|t| **t as usize >= rows) {
        return refuse(format!("embedding: there is no row {token}, it has {rows}"));
    }
    let mut shape = own.to_vec();
    shape.push(width);
    let mut rules = vec![Rule::whole(2)];
    for axis in 0..own.len() {
        rules.push(Rule::split(axis, &[Some(axis), None], Sbp::Split(axis)));
    }
    rules.push(Rule::split(
        OUTPUTS,
        &[None, Some(1)],
        Sbp::Split(own.len()),
    ));
    rules.push(Rule::split(INPUTS, &[None, Some(0)], Sbp::partial_sum()));
    let operands = [tokens.layout(), &*table];
    step.check_parameters("embedding")?;
    let automatic = step.is_automatic();
    let price = |from: &Layout, to: &Layout| step.price(from, to);
    let decision = rules::decide("embedding", &operands, &rules, &shape, automatic, &price)?;
    let made = decision.result(table.mesh(), &shape)?;
    let tokens = tokens.to(&decision.takes[0])?;
    let rank = step.placement().rank();
    let local_shape = tokens.layout().shape_of(rank);
    let block = decision.takes[1].block(rank);
    let gathered = is_gathered(step, id, &decision.takes[1])?;
    let part = || -> Result<Tensor<'s>> {
        let table = weight(step, id, &decision.takes[1], "embedding")?;
        if block[0].len() == rows {
            return step
                .local()
                .embedding(table, tokens.local(), &local_shape, padding);
        }
        // Rows of other ranks count as zeros.
        let mut part_shape = local_shape.clone();
        if block[0].is_empty() {
            part_shape.push(block[1].len());
            return zeros_of(step, &part_shape, vec![tensor(step, table)?]);
        }
        let is_own = |t: &u32| block[0].contains(&(*t as usize));
        let first = block[0].start as u32;
        let chosen: Vec<u32> = tokens
            .local()
            .iter()
            .map(|t| if is_own(t) { t - first } else { 0 })
            .collect();
        let mask: Vec<f32> = (tokens.local().iter())
            .map(|t| f32::from(u8::from(is_own(t))))
            .collect();
        // The padding row's gradient is left out where it lies.
        let padding = padding.filter(is_own).map(|p| p - first);
        let found = step
            .local()
            .embedding(table, &chosen, &local_shape, padding)?;
        part_shape.push(1);
        found.mul(step.local().input(&mask, &part_shape)?)
    };
    let local = match gathered && step.local().training() {
        // The segment begins with a tensor that is not used.
        true => step.local().input(&[], &[0])?.recompute(|_| part())?,
        false => part()?,
    };
    Global::new(step, local, Rc::new(made)).summed("embedding", id)
}
