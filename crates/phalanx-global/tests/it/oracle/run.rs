//! Runs one operation with operands that lie in some way, and compares it with the serial one.

use phalanx_global::{Global, GlobalParams, GlobalStep, Indices, Layout, Placement, Sbp};
use phalanx_nn::losses::IGNORE_LABEL;
use phalanx_nn::{
    GradView, Grads, Init, ParamId, Params, Precision, Result, Scope, Seed, StepKey, Tape, Threads,
    Value,
};

use super::ops::Op;
use super::table::{Kind, Row};
use crate::common::{coordinates, indices, number};

/// A multiple of 1/32 between -1 and 1.
fn grid(key: &[usize]) -> f32 {
    (number(key) * 32.0).round() / 32.0
}

/// The serial value of an element of an operand. In bf16 the values are rounded, and so not on a grid.
fn value(kind: Kind, precision: Precision, key: &[usize]) -> f32 {
    match kind {
        Kind::Powers => {
            let n = number(key);
            ((n.abs() * 4.0).floor() - 2.0).exp2().copysign(n)
        }
        _ if precision == Precision::Bf16 => number(key),
        _ => grid(key),
    }
}

fn values(kind: Kind, precision: Precision, which: usize, shape: &[usize]) -> Vec<f32> {
    let full: Vec<_> = shape.iter().map(|n| 0..*n).collect();
    let all = indices(&full);
    let key = |index: &[usize]| [&[which + 100], index].concat();
    all.iter()
        .map(|index| value(kind, precision, &key(index)))
        .collect()
}

/// Tokens or labels; of labels some are ignored.
fn numbers(row: &Row) -> (Vec<u32>, Vec<usize>) {
    let Some((shape, below)) = &row.numbers else {
        return (Vec::new(), vec![0]);
    };
    let ignores = !row.operands.is_empty();
    let one = |i: usize| match ignores && i % 4 == 2 {
        true => IGNORE_LABEL,
        false => (i * i + i / 2) as u32 % below,
    };
    (
        (0..shape.iter().product()).map(one).collect(),
        shape.clone(),
    )
}

/// What one rank has of a tensor: of partial tensors, parts of different size and sign.
fn part(layout: &Layout, whole: &[f32], which: usize, rank: usize, size: f32) -> Vec<f32> {
    let (mesh, shape) = (layout.mesh(), layout.shape());
    let at = coordinates(mesh, rank);
    let partial = |d: &usize| matches!(layout.sbp()[*d], Sbp::Partial(_));
    let (mut own, mut parts) = (0, 1);
    for d in (0..mesh.len()).filter(partial) {
        own = own * mesh[d] + at[d];
        parts *= mesh[d];
    }
    let of = |index: &Vec<usize>| {
        let place = index.iter().zip(shape).fold(0, |at, (i, n)| at * n + i);
        let share = |k: usize| size * grid(&[&[which + 200, k], &index[..]].concat());
        match own + 1 == parts {
            false => share(own),
            // What is missing.
            true => whole[place] - (0..own).map(share).sum::<f32>(),
        }
    };
    indices(&layout.block(rank)).iter().map(of).collect()
}

/// Even ranges, or ones of which every second is empty.
fn layout(mesh: &[usize], shape: &[usize], sbp: &[Sbp], uneven: bool) -> Layout {
    let even = Layout::even(mesh, shape, sbp).unwrap();
    if !uneven {
        return even;
    }
    let cuts: Vec<(usize, Vec<usize>)> = (0..shape.len())
        .filter_map(|axis| {
            let parts = even.cuts(axis)?.len() - 1;
            let cut = |i: usize| match i {
                0 => 0,
                i if i == parts => shape[axis],
                i => (shape[axis] / 3 + i.div_ceil(2)).min(shape[axis]),
            };
            Some((axis, (0..=parts).map(cut).collect()))
        })
        .collect();
    let cuts: Vec<(usize, &[usize])> = cuts.iter().map(|(a, c)| (*a, &c[..])).collect();
    Layout::uneven(mesh, shape, sbp, &cuts).unwrap()
}

fn model(row: &Row, precision: Precision) -> (Params, Vec<ParamId>) {
    let mut scope = Scope::new(Seed(0));
    let ids: Vec<ParamId> = (row.params.iter().enumerate())
        .map(|(i, (shape, order))| {
            scope.param(&format!("p{i}"), shape, *order, Init::Constant(0.0))
        })
        .collect();
    let mut params = scope.build().unwrap();
    for (i, id) in ids.iter().enumerate() {
        let all = values(Kind::Grid, precision, 10 + i, &row.params[i].0);
        params.import(*id, &all).unwrap();
    }
    (params, ids)
}

/// Result and gradients.
#[derive(Debug)]
pub struct Made {
    shape: Vec<usize>,
    value: Vec<f32>,
    /// Of operands, `None` for targets; then of parameters.
    grads: Vec<Option<Vec<f32>>>,
}

const KEY: (u64, u64) = (3, 5);

/// The factors of the result's elements in the loss.
fn factors(numel: usize) -> Vec<f32> {
    (0..numel).map(|i| grid(&[7, i])).collect()
}

/// The operation on one rank.
pub fn serial(tape: &mut Tape, row: &Row, precision: Precision) -> Result<Made> {
    let (params, ids) = model(row, precision);
    tape.set_precision(precision);
    let mut grads = Grads::like(&params);
    let step = tape.step(&params, StepKey::new(KEY.0, KEY.1));
    let mut operands = Vec::new();
    for (i, (shape, kind)) in row.operands.iter().enumerate() {
        let all = values(*kind, precision, i, shape);
        operands.push(match kind {
            Kind::Target => step.input(&all, shape)?,
            _ => step.variable(&all, shape)?,
        });
    }
    let shared = operands.iter().map(|o| o.share()).collect();
    let y = row.op.run(&step, shared, Some(&numbers(row)), &ids)?;
    let (shape, value) = (y.shape(), y.to_vec());
    let w = step.input(&factors(value.len()), &shape)?;
    y.mul(w)?.sum(&[], false)?.backward(&mut grads)?;
    let mut all: Vec<Option<Vec<f32>>> = (operands.iter().zip(&row.operands))
        .map(|(o, (_, kind))| match kind {
            Kind::Target => None,
            _ => Some(o.grad().unwrap_or_else(|| vec![0.0; o.numel()])),
        })
        .collect();
    all.extend(ids.iter().map(|id| Some(grads.export(*id))));
    Ok(Made {
        shape,
        value,
        grads: all,
    })
}

/// How the operands of a combination lie: operands, numbers, parameters; for each the SBP of every
/// mesh dimension.
#[derive(Clone, Debug)]
pub struct Lay {
    pub sbp: Vec<Vec<Sbp>>,
    pub uneven: bool,
}

fn close(what: &str, got: &[f32], want: &[f32], error: f32) -> std::result::Result<(), String> {
    if got.len() != want.len() {
        return Err(format!(
            "{what}: {} elements, not {}",
            got.len(),
            want.len()
        ));
    }
    let finite = want.iter().filter(|v| v.is_finite());
    let most = finite.fold(0f32, |m, v| m.max(v.abs()));
    let same = |a: f32, b: f32| {
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= error * most.max(1.0)
    };
    match got.iter().zip(want).position(|(a, b)| !same(*a, *b)) {
        None => Ok(()),
        Some(i) => Err(format!(
            "{what}: element {i} is {}, not {} ({got:?}, not {want:?})",
            got[i], want[i]
        )),
    }
}

/// Operands as they lie, with what is read of them after the backward pass.
fn operands<'s>(
    step: &'s GlobalStep<'_>,
    row: &Row,
    lay: &Lay,
    precision: Precision,
) -> Result<Vec<Global<'s>>> {
    let mesh = step.placement().sizes();
    let rank = step.placement().group().rank();
    let mut all = Vec::new();
    for (i, ((shape, kind), sbp)) in row.operands.iter().zip(&lay.sbp).enumerate() {
        let whole = values(*kind, precision, i, shape);
        let plain = !lay.uneven && !sbp.iter().any(|s| matches!(s, Sbp::Partial(_)));
        all.push(match (plain, kind) {
            (true, Kind::Target) => step.input(&whole, shape, sbp)?,
            (true, _) => step.variable(&whole, shape, sbp)?,
            _ => {
                let layout = layout(mesh, shape, sbp, lay.uneven);
                let size = match precision {
                    Precision::F32 => 4.0,
                    // Larger parts are rounded more.
                    Precision::Bf16 => 0.5,
                };
                let own = part(&layout, &whole, i, rank, size);
                let own_shape = layout.shape_of(rank);
                let local = match kind {
                    Kind::Target => step.local().input(&own, &own_shape)?,
                    _ => step.local().variable(&own, &own_shape)?,
                };
                let global = step.to_global(local, sbp)?;
                assert_eq!(*global.layout(), layout);
                global
            }
        });
    }
    Ok(all)
}

/// What runs on one rank of a mesh.
pub struct Bench<'p> {
    pub placement: &'p Placement,
    pub tape: Tape,
    pub precision: Precision,
    /// What went wrong.
    pub failures: Vec<String>,
    pub combinations: usize,
    pub direct: usize,
    pub refused: usize,
}

impl<'p> Bench<'p> {
    pub fn new(placement: &'p Placement, precision: Precision) -> Self {
        Bench {
            placement,
            tape: Tape::new(Threads(1)),
            precision,
            failures: Vec::new(),
            combinations: 0,
            direct: 0,
            refused: 0,
        }
    }

    /// Whether the combination must run without a conversion.
    fn is_direct(row: &Row, lay: &Lay) -> bool {
        (0..lay.sbp[0].len()).all(|dim| {
            let own: Vec<Sbp> = lay.sbp.iter().map(|sbp| sbp[dim]).collect();
            row.direct.contains(&own)
        })
    }

    /// Runs the combination without automatic conversions, which must be as `row` says, then with
    /// them if it was refused, and compares with `want`.
    pub fn check(&mut self, row: &Row, want: &Result<Made>, lay: &Lay) {
        self.combinations += 1;
        if let Err(e) = self.try_check(row, want, lay) {
            let all: Vec<String> = lay.sbp.iter().map(|s| format!("{s:?}")).collect();
            self.failures.push(format!(
                "{:?} of {:?} {:?} on {:?}, {:?}, {}{}: {e}",
                row.op,
                row.operands.iter().map(|o| &o.0).collect::<Vec<_>>(),
                row.params.iter().map(|o| &o.0).collect::<Vec<_>>(),
                self.placement.sizes(),
                self.precision,
                all.join(" "),
                if lay.uneven { " uneven" } else { "" },
            ));
        }
    }

    fn try_check(
        &mut self,
        row: &Row,
        want: &Result<Made>,
        lay: &Lay,
    ) -> std::result::Result<(), String> {
        let (params, ids) = model(row, self.precision);
        let mut of_params = lay.sbp[lay.sbp.len() - ids.len()..].iter().cloned();
        let weights =
            GlobalParams::new(self.placement, &params, |_| of_params.next().unwrap()).unwrap();
        let mut grads = weights.grads();
        self.tape.set_precision(self.precision);
        let step = weights.step(&mut self.tape, StepKey::new(KEY.0, KEY.1));
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let leaves = operands(&step, row, lay, self.precision).map_err(|e| text(&e))?;
        let numbers = self::numbers(row);
        let at = row.operands.len();
        let numbers = match row.numbers {
            Some(_) if !lay.uneven => step
                .indices(&numbers.0, &numbers.1, &lay.sbp[at])
                .map_err(|e| text(&e))?,
            Some(_) => {
                let mesh = self.placement.sizes();
                let layout = layout(mesh, &numbers.1, &lay.sbp[at], true);
                let floats: Vec<f32> = numbers.0.iter().map(|n| f32::from_bits(*n)).collect();
                let own = part(&layout, &floats, 0, self.placement.group().rank(), 0.0);
                let own: Vec<u32> = own.iter().map(|n| n.to_bits()).collect();
                let shape = layout.shape_of(self.placement.group().rank());
                Indices::from_local(self.placement, &own, &shape, &lay.sbp[at])
                    .map_err(|e| text(&e))?
            }
            None => step
                .indices(
                    &[],
                    &[0],
                    &vec![Sbp::Broadcast; self.placement.sizes().len()],
                )
                .map_err(|e| text(&e))?,
        };
        let run = || {
            let shared = leaves.iter().map(Global::share).collect();
            row.op.run(&step, shared, Some(&numbers), &ids)
        };
        let declared = Self::is_direct(row, lay);
        step.set_automatic(false);
        let direct = run();
        step.set_automatic(true);
        let Ok(want) = want else {
            // What one rank refuses, all refuse.
            return match (direct, run()) {
                (Err(_), Err(_)) => Ok(()),
                _ => Err("works, but not on one rank".to_owned()),
            };
        };
        let y = match direct {
            Ok(_) if !declared && !lay.uneven => return Err("ran without a declared rule".into()),
            Ok(y) => {
                self.direct += 1;
                y
            }
            Err(e) if declared && !lay.uneven => return Err(format!("declared, but refused: {e}")),
            Err(e) => {
                self.refused += 1;
                Self::check_refusal(row, &leaves, &e.to_string())?;
                run().map_err(|e| text(&e))?
            }
        };
        if y.layout().shape() != want.shape {
            return Err(format!(
                "shape {:?}, not {:?}",
                y.layout().shape(),
                want.shape
            ));
        }
        let (forward, backward) = match self.precision {
            Precision::F32 => row.errors,
            Precision::Bf16 => (3e-2, 3e-2),
        };
        let full = y.full().map_err(|e| text(&e))?;
        let whole = vec![Sbp::Broadcast; self.placement.sizes().len()];
        let w = step
            .input(&factors(full.len()), &want.shape, &whole)
            .map_err(|e| text(&e))?;
        let loss = y.mul(w).and_then(|y| Value::sum(y, &[], false));
        loss.and_then(|loss| loss.backward(&mut grads))
            .map_err(|e| format!("backward: {e}"))?;
        let mut all = Vec::new();
        for (i, leaf) in leaves.iter().enumerate() {
            all.push(match row.operands[i].1 {
                Kind::Target => None,
                _ => leaf.grad().map_err(|e| text(&e))?,
            });
        }
        let mut flat = vec![0.0; weights.local().flat().len()];
        for (id, info) in ids.iter().zip(weights.local().infos()) {
            flat[info.offset..info.offset + info.len].copy_from_slice(grads.grad(*id));
        }
        for id in &ids {
            all.push(Some(weights.full_of(*id, &flat).map_err(|e| text(&e))?));
        }
        // Nothing is sent any more, so that one rank's failure stops no other.
        close("result", &full, &want.value, forward)?;
        for (i, (got, want)) in all.iter().zip(&want.grads).enumerate() {
            match (got, want) {
                (Some(got), Some(want)) => close(&format!("gradient {i}"), got, want, backward)?,
                (None, Some(want)) if want.iter().all(|g| *g == 0.0) => {}
                (None, None) => {}
                _ => return Err(format!("gradient {i} is {got:?}, not {want:?}")),
            }
        }
        Ok(())
    }

    /// The message has both operands and the rules.
    fn check_refusal(
        row: &Row,
        leaves: &[Global<'_>],
        message: &str,
    ) -> std::result::Result<(), String> {
        let shown = |sbp: &Vec<Sbp>| {
            let all: Vec<String> = sbp.iter().map(Sbp::to_string).collect();
            format!("({}) -> ", all.join(", "))
        };
        let has_order = row.params.iter().any(|p| p.1 != phalanx_nn::Layout::Same);
        let rules = row.direct.iter().all(|d| message.contains(&shown(d)));
        let operands = leaves
            .iter()
            .all(|l| message.contains(&l.layout().to_string()));
        if !message.contains("to_global")
            || (!row.is_composite && (!operands || (!rules && !has_order && !is_reshape(row))))
        {
            return Err(format!("the message says too little: {message}"));
        }
        Ok(())
    }

    /// Minima and maxima are refused, whether conversions are automatic or not.
    pub fn check_extremes(&mut self, row: &Row, serial: &Result<Made>) {
        let mesh = self.placement.sizes();
        let (params, ids) = model(row, self.precision);
        let whole = vec![Sbp::Broadcast; mesh.len()];
        let weights = GlobalParams::new(self.placement, &params, |_| whole.clone()).unwrap();
        for which in 0..row.operands.len() {
            for extreme in [phalanx_global::Fold::Min, phalanx_global::Fold::Max] {
                self.combinations += 1;
                let step = weights.step(&mut self.tape, StepKey::new(KEY.0, KEY.1));
                let made = |i: usize| {
                    let mut sbp = whole.clone();
                    if i == which {
                        sbp[0] = Sbp::Partial(extreme);
                    }
                    let (shape, kind) = &row.operands[i];
                    let all = values(*kind, self.precision, i, shape);
                    step.variable(&all, shape, &sbp).unwrap()
                };
                let leaves: Vec<_> = (0..row.operands.len()).map(made).collect();
                let (all, shape) = self::numbers(row);
                let numbers = step.indices(&all, &shape, &whole).unwrap();
                for automatic in [false, true] {
                    step.set_automatic(automatic);
                    let shared = leaves.iter().map(Global::share).collect();
                    let says = match row.op.run(&step, shared, Some(&numbers), &ids) {
                        Ok(_) => "nothing".to_owned(),
                        Err(e) => e.to_string(),
                    };
                    let shown = leaves[which].layout().to_string();
                    // An empty maximum is refused for that.
                    let ok = says.contains("minimum or maximum") && says.contains(&shown)
                        || serial.is_err()
                        || matches!(row.op, Op::Named("share"))
                        || says.contains("hold nothing");
                    if !ok {
                        self.failures.push(format!(
                            "{:?}, operand {which} is {extreme:?}, automatic {automatic}: {says}",
                            row.op
                        ));
                    }
                }
                self.refused += 1;
            }
        }
    }
}

/// Its rules depend on the ranges.
fn is_reshape(row: &Row) -> bool {
    matches!(row.op, Op::Reshape(_))
}
