//! Every operation, with the combinations of SBPs that it takes without a conversion. They are
//! stated here, not read from the crate.

use phalanx_nn::layers::{Act, Activation, AvgPool2dOptions, Conv2dOptions, MaxPool2dOptions};
use phalanx_nn::{Layout as Order, Reduction};

use super::ops::Op;
use phalanx_global::Sbp;

/// Of what kind the numbers of an operand are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Multiples of 1/32 of either sign, so that sums and products have no error.
    Grid,
    /// Powers of two of either sign.
    Powers,
    /// As `Grid`, but no gradient is wanted.
    Target,
}

/// An operation, its operands and parameters, and what is expected of it.
#[derive(Clone, Debug)]
pub struct Row {
    pub op: Op,
    pub operands: Vec<(Vec<usize>, Kind)>,
    /// Numbers that choose classes or rows: shape, and below which number they are.
    pub numbers: Option<(Vec<usize>, u32)>,
    /// In PyTorch's order of axes.
    pub params: Vec<(Vec<usize>, Order)>,
    /// Combinations that need no conversion: operands, numbers, parameters.
    pub direct: Vec<Vec<Sbp>>,
    /// Error of the result and of gradients, relative to the largest element; 0: the same bits.
    pub errors: (f32, f32),
    /// Is a product that may be computed in bf16.
    pub is_product: bool,
    /// Is made of several operations, of which any may refuse.
    pub is_composite: bool,
}

/// `"S0 B P"`
pub fn parse(combination: &str) -> Vec<Sbp> {
    let one = |word: &str| match word {
        "B" => Sbp::broadcast(),
        "P" => Sbp::partial_sum(),
        axis => Sbp::split(axis[1..].parse().unwrap()),
    };
    combination.split_whitespace().map(one).collect()
}

const ROUNDED: f32 = 2e-6;
const NORMED: f32 = 2e-5;

fn row(op: Op, shapes: &[&[usize]], direct: &[&str]) -> Row {
    Row {
        op,
        operands: shapes.iter().map(|s| (s.to_vec(), Kind::Grid)).collect(),
        numbers: None,
        params: Vec::new(),
        direct: direct.iter().map(|d| parse(d)).collect(),
        errors: (0.0, 0.0),
        is_product: false,
        is_composite: false,
    }
}

impl Row {
    fn also(mut self, when: bool, direct: &[&str]) -> Self {
        if when {
            self.direct.extend(direct.iter().map(|d| parse(d)));
        }
        self
    }

    fn rounded(self, error: f32) -> Self {
        Row {
            errors: (error, error),
            ..self
        }
    }

    fn rounded_gradient(self, error: f32) -> Self {
        Row {
            errors: (0.0, error),
            ..self
        }
    }

    fn kind(mut self, operand: usize, kind: Kind) -> Self {
        self.operands[operand].1 = kind;
        self
    }

    fn with(mut self, shape: &[usize], order: Order) -> Self {
        self.params.push((shape.to_vec(), order));
        self
    }

    fn product(mut self, weight: &[usize], order: Order) -> Self {
        self.is_product = true;
        self.with(weight, order)
    }

    fn bias(self, n: usize) -> Self {
        self.with(&[n], Order::Same)
    }

    fn composite(self) -> Self {
        Row {
            is_composite: true,
            ..self
        }
    }

    fn choosing(mut self, shape: &[usize], below: u32) -> Self {
        self.numbers = Some((shape.to_vec(), below));
        self
    }
}

/// Whether `n` elements over `p` ranks begin at multiples of `unit` everywhere.
fn even_at(n: usize, p: usize, unit: usize) -> bool {
    let begin = |i: usize| i * (n / p) + i.min(n % p);
    (0..=p).all(|i| begin(i).is_multiple_of(unit))
}

/// All rows for an axis of `n` elements over `p` ranks.
pub fn rows(n: usize, p: usize) -> Vec<Row> {
    [
        elementwise(n),
        moving(n, p),
        reductions(n),
        products(n),
        convolutions(n),
        norms(n),
        pools(n),
        losses(n),
    ]
    .concat()
}

fn elementwise(n: usize) -> Vec<Row> {
    let one = ["B", "S0", "S1"];
    let mut all = Vec::new();
    for name in ["relu", "relu6", "hardswish", "hardsigmoid", "leaky_relu"] {
        all.push(row(Op::Named(name), &[&[n, 3]], &one).rounded(ROUNDED));
    }
    for name in ["gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "exp"] {
        all.push(row(Op::Named(name), &[&[3, n]], &one).rounded(ROUNDED));
    }
    all.push(row(Op::Function(Activation::Silu), &[&[n]], &["B", "S0"]).rounded(ROUNDED));
    all.push(row(Op::Scale(-0.5), &[&[n, 3]], &one).also(true, &["P"]));
    all.push(row(Op::Named("share"), &[&[n, 3]], &one).also(true, &["P"]));
    all.push(
        row(Op::Recompute, &[&[n, 3]], &one)
            .rounded(ROUNDED)
            .composite(),
    );
    all.push(
        row(Op::Evaluate, &[&[n, 3]], &one)
            .rounded(ROUNDED)
            .composite(),
    );
    // The mask is the whole tensor's.
    all.push(row(Op::Dropout, &[&[n, 3]], &one).also(true, &["P"]));
    all.push(row(Op::Dropout, &[&[2, n]], &one).also(true, &["P"]));
    for shape in [[n, 2, 2, 3], [2, 2, n, 3], [2, 2, 2, n]] {
        let direct = ["B", "S0", "S1", "S2", "S3", "P"];
        all.push(row(Op::Dropout2d, &[&shape], &direct));
    }
    for (op, sums) in [
        (Op::Add, &["P P"][..]),
        (Op::Sub, &["P P"]),
        (Op::Mul, &["P B", "B P"]),
        (Op::Div, &["P B"]),
    ] {
        let two = |a: &[usize], b: &[usize], direct: &[&str]| {
            let row = row(op.clone(), &[a, b], direct).also(true, &["B B"]);
            let row = row.also(true, sums);
            match op {
                Op::Div => row.kind(1, Kind::Powers),
                _ => row,
            }
        };
        all.push(two(&[n, 3], &[n, 3], &["S0 S0", "S1 S1"]));
        // A bias, on either side.
        all.push(two(&[n, 3], &[3], &["S0 B", "S1 S0"]));
        all.push(two(&[3], &[n, 3], &["B S0", "S0 S1"]));
        all.push(two(&[3, n], &[n], &["S0 B", "S1 S0"]));
        // A number.
        all.push(two(&[n, 3], &[], &["S0 B", "S1 B"]));
        // A size of 1 repeats, unless the other one is 1 too.
        let (ours, both) = (["S0 B", "S1 S1"], ["S0 S0", "S1 S1"]);
        all.push(two(&[n, 3], &[1, 3], if n == 1 { &both } else { &ours }));
        let (ours, both) = (["S0 B", "B S1"], ["S0 S0", "B S1"]);
        all.push(two(&[n, 1], &[1, 4], if n == 1 { &both } else { &ours }));
    }
    all
}

/// Operations that only move elements.
fn moving(n: usize, p: usize) -> Vec<Row> {
    let mut all = Vec::new();
    let mut reshape = |from: &[usize], to: &[usize], splits: &[(&str, bool)]| {
        let mut made = row(Op::Reshape(to.to_vec()), &[from], &["B", "P"]);
        for (split, when) in splits {
            made = made.also(*when, &[split]);
        }
        all.push(made);
    };
    // Axes of size 1 belong to no axis of the result, and with no elements none belongs to any.
    let (some, many) = (n > 0, n > 1);
    reshape(&[n, 4], &[4 * n], &[("S0", many), ("S1", n == 1)]);
    reshape(
        &[4 * n],
        &[n, 4],
        &[("S0", n == 1 || many && even_at(4 * n, p, 4))],
    );
    reshape(
        &[2, n, 3],
        &[2 * n, 3],
        &[("S0", some), ("S2", some), ("S1", false)],
    );
    reshape(
        &[2 * n, 3],
        &[2, n, 3],
        &[("S0", n == 1 || many && even_at(2 * n, p, n)), ("S1", some)],
    );
    reshape(&[n, 2, 3], &[n, 6], &[("S0", many), ("S1", some)]);
    reshape(
        &[n, 6],
        &[n, 2, 3],
        &[("S0", many), ("S1", some && even_at(6, p, 3))],
    );
    reshape(
        &[2, n],
        &[n, 2],
        &[
            (
                "S0",
                n == 1 || n == 2 || some && (n.is_multiple_of(2) || even_at(2, p, 2)),
            ),
            ("S1", n == 2),
        ],
    );
    reshape(&[n, 3], &[n, 3], &[("S0", n != 1), ("S1", true)]);
    reshape(&[n, 3], &[1, n, 1, 3], &[("S0", many), ("S1", some)]);
    let images = ["B", "S0", "S3", "P"];
    all.push(row(Op::Flatten, &[&[n, 2, 3, 2]], &images));
    all.push(row(Op::Flatten, &[&[2, 2, 2, n]], &images));
    all.push(row(Op::Flatten, &[&[2, n, 2, 2]], &images));
    let rows = row(Op::Flatten, &[&[n, 2, 3]], &["B", "P"]);
    all.push(rows.also(n > 1, &["S0"]).also(n > 0, &["S1"]));
    let three = ["B", "S0", "S1", "S2", "P"];
    all.push(row(Op::Permute(vec![2, 0, 1]), &[&[n, 2, 3]], &three));
    all.push(row(Op::Permute(vec![1, 0, 2]), &[&[2, n, 3]], &three));
    all.push(row(Op::Transpose(0, 2), &[&[2, 3, n]], &three));
    let two = ["B", "S0", "S1", "P"];
    all.push(row(Op::Slice(0, n / 3..n - n / 4), &[&[n, 3]], &two));
    all.push(row(Op::Slice(1, 1..3), &[&[n, 4]], &two));
    all.push(row(Op::Slice(1, n..n), &[&[2, n]], &two));
    all.push(row(Op::Slice(0, 0..n), &[&[n, 2]], &two));
    let (along_1, along_0) = (
        ["B B B", "S0 S0 S0", "P P P"],
        ["B B B", "S1 S1 S1", "P P P"],
    );
    all.push(row(Op::Concat(1), &[&[n, 2], &[n, 1], &[n, 2]], &along_1));
    all.push(row(Op::Concat(1), &[&[2, n], &[2, 1], &[2, n]], &along_1));
    all.push(row(Op::Concat(0), &[&[n, 2], &[2, 2], &[n, 2]], &along_0));
    all.push(row(Op::Concat(0), &[&[n, 2]], &["B", "S1", "P"]));
    all
}

fn reductions(n: usize) -> Vec<Row> {
    let mut all = Vec::new();
    let all_axes = |rank: usize| -> Vec<String> { (0..rank).map(|a| format!("S{a}")).collect() };
    let shapes: [(&[usize], &[&[usize]]); 3] = [
        (&[n, 3], &[&[0], &[1], &[]]),
        (&[3, n], &[&[0], &[1]]),
        (&[2, n, 3], &[&[0, 2], &[1], &[2, 1]]),
    ];
    for (shape, over) in shapes {
        for dims in over {
            for keep in [false, true] {
                let splits = all_axes(shape.len());
                let splits: Vec<&str> = splits.iter().map(String::as_str).collect();
                let of = |op| row(op, &[shape], &splits).also(true, &["B"]);
                let dims = dims.to_vec();
                all.push(of(Op::Sum(dims.clone(), keep)).also(true, &["P"]));
                let mean = of(Op::Mean(dims.clone(), keep)).also(true, &["P"]);
                all.push(mean.rounded(ROUNDED));
                // Equal elements share the gradient.
                all.push(of(Op::Max(dims, keep)).rounded_gradient(ROUNDED));
            }
        }
    }
    all.push(row(Op::Softmax(1), &[&[n, 3]], &["B", "S0"]).rounded(ROUNDED));
    all.push(row(Op::Softmax(1), &[&[3, n]], &["B", "S0"]).rounded(ROUNDED));
    all.push(row(Op::Softmax(0), &[&[n, 3]], &["B", "S1"]).rounded(ROUNDED));
    all.push(row(Op::Softmax(1), &[&[2, n, 3]], &["B", "S0", "S2"]).rounded(ROUNDED));
    all.push(row(Op::LogSoftmax(0), &[&[3, n]], &["B", "S1"]).rounded(ROUNDED));
    all.push(row(Op::Cumsum(0), &[&[3, n]], &["B", "S1"]).rounded(ROUNDED));
    all.push(row(Op::Cumsum(1), &[&[2, n, 3]], &["B", "S0", "S2"]).rounded(ROUNDED));
    all.push(row(Op::Rotary, &[&[n, 2, 4]], &["B", "S0"]).rounded(ROUNDED));
    all.push(row(Op::Rotary, &[&[2, n, 8]], &["B", "S0"]).rounded(ROUNDED));
    all.push(row(Op::Named("log_softmax"), &[&[n, 3]], &["B", "S0"]).rounded(ROUNDED));
    all
}

fn products(n: usize) -> Vec<Row> {
    let mut all = Vec::new();
    // Batch, inputs, outputs.
    for (x, [i, o]) in [
        (vec![n, 3], [3, 4]),
        (vec![2, n], [n, 4]),
        (vec![2, 3], [3, n]),
        (vec![2, n, 3], [3, 2]),
    ] {
        let last = x.len() - 1;
        // Of the weight as matmul takes it, (inputs, outputs), and as linear does.
        let of = |op: Op, [inputs, outputs]: [usize; 2], order: [usize; 2]| {
            let mut made = row(op, &[&x], &["B B", &format!("B S{outputs}")]);
            for axis in 0..last {
                made = made.also(true, &[&format!("S{axis} B")]);
            }
            made.product(&order, Order::Same)
                .also(false, &[])
                .also(true, &[&format!("S{last} S{inputs}"), "P B"])
        };
        all.push(of(Op::Matmul, [0, 1], [i, o]));
        all.push(of(Op::Linear(Act::None), [1, 0], [o, i]));
        for act in [Act::None, Act::Relu, Act::Relu6] {
            // A bias is added to one of the partial results, and a function must see the whole:
            // those need a conversion.
            let mut made = row(Op::Linear(act), &[&x], &["B B B", "B S0 S0"]);
            for axis in 0..last {
                made = made.also(true, &[&format!("S{axis} B B")]);
            }
            all.push(made.product(&[o, i], Order::Same).bias(o).composite());
        }
        let mut made = row(Op::Linear(Act::Relu), &[&x], &["B B", "B S0"]);
        for axis in 0..last {
            made = made.also(true, &[&format!("S{axis} B")]);
        }
        all.push(made.product(&[o, i], Order::Same).composite());
    }
    for (a, b) in [
        ([n, 2, 3], [n, 3, 2]),
        ([2, n, 3], [2, 3, 2]),
        ([2, 2, n], [2, n, 3]),
        ([2, 2, 3], [2, 3, n]),
    ] {
        let both = ["B B", "S0 S0", "S1 B", "P B", "B P"];
        all.push(row(Op::Bmm, &[&a, &b], &both).also(true, &["B S2", "S2 S1"]));
        let b = [b[0], b[2], b[1]];
        all.push(row(Op::BmmTransposed, &[&a, &b], &both).also(true, &["B S1", "S2 S2"]));
    }
    let flat = ["B B", "S0 B", "B S1", "S1 S0", "P B", "B P"];
    all.push(row(Op::Bmm, &[&[2, n], &[n, 3]], &flat));
    // Tokens, then the table; a split of its rows makes a sum.
    let table = ["B B", "S0 B", "B S0", "B S1"];
    for padding in [None, Some(1)] {
        let of = |shape: &[usize], direct: &[&str]| {
            row(Op::Embedding(padding), &[], direct).choosing(shape, 5)
        };
        all.push(of(&[n], &table).with(&[5, 3], Order::Same));
        let more = of(&[2, n], &table).also(true, &["S1 B"]);
        all.push(more.with(&[5, 3], Order::Same));
        all.push(of(&[3], &table).with(&[5, n], Order::Same));
        if n > 1 {
            let rows = row(Op::Embedding(padding), &[], &table).choosing(&[4], n as u32);
            all.push(rows.with(&[n, 2], Order::Same));
        }
    }
    all
}

fn convolutions(n: usize) -> Vec<Row> {
    let mut all = Vec::new();
    // Sequences, then images: batch, inputs, outputs; with and without bias; with groups.
    let along = Conv2dOptions::rect(1, 3).padding_rect(0, 1);
    for (batch, i, o) in [(n, 2, 4), (2, n, 2), (2, 2, n)] {
        let op = |act| Op::Conv1d(along, act);
        let (x, w) = ([batch, 5, i], [o, i, 3]);
        let plain = ["B B", "S0 B", "B S0", "S2 S1", "P B"];
        all.push(row(op(Act::None), &[&x], &plain).product(&w, Order::Conv1d));
        let biased = row(op(Act::Relu), &[&x], &["B B B", "S0 B B", "B S0 S0"]);
        let biased = biased.product(&w, Order::Conv1d).bias(o);
        all.push(biased.composite());
        let op = |act| Op::Conv2d(Conv2dOptions::new(2).padding(1), act);
        let (x, w) = ([batch, 2, 3, i], [o, i, 2, 2]);
        let plain = ["B B", "S0 B", "B S0", "S3 S1", "P B"];
        all.push(row(op(Act::None), &[&x], &plain).product(&w, Order::Conv));
        let biased = row(op(Act::None), &[&x], &["B B B", "S0 B B", "B S0 S0"]);
        all.push(biased.product(&w, Order::Conv).bias(o));
    }
    let groups = Conv2dOptions::new(2).groups(2);
    let op = Op::Conv2d(groups, Act::None);
    let grouped = row(op.clone(), &[&[n, 3, 3, 4]], &["B B", "S0 B", "P B"]);
    all.push(grouped.product(&[2, 2, 2, 2], Order::Conv));
    let biased = row(op, &[&[n, 3, 3, 4]], &["B B B", "S0 B B"]);
    all.push(biased.product(&[2, 2, 2, 2], Order::Conv).bias(2));
    let op = Op::Conv1d(along.groups(2), Act::None);
    let grouped = row(op, &[&[n, 4, 4]], &["B B", "S0 B", "P B"]);
    all.push(grouped.product(&[2, 2, 3], Order::Conv1d));
    for (batch, i, o) in [(n, 2, 2), (2, n, 2), (2, 2, n)] {
        let op = Op::ConvTranspose2d(Conv2dOptions::new(2).stride(2), [1, 0]);
        let plain = row(op.clone(), &[&[batch, 2, 2, i]], &["B B", "S0 B", "P B"]);
        all.push(plain.product(&[i, o, 2, 2], Order::Conv));
        let biased = row(op, &[&[batch, 2, 2, i]], &["B B B", "S0 B B"]);
        all.push(biased.product(&[i, o, 2, 2], Order::Conv).bias(o));
    }
    // Products of numbers without error, but added in tiles of other sizes.
    all.into_iter().map(|row| row.rounded(ROUNDED)).collect()
}

fn norms(n: usize) -> Vec<Row> {
    let mut all = Vec::new();
    for params in 0..=2 {
        let whole = |combination: &str| {
            let mut all = combination.to_owned();
            (0..params).for_each(|_| all.push_str(" B"));
            all
        };
        let of = |op: Op, x: &[usize], splits: &[&str], shape: &[usize]| {
            let direct: Vec<String> = splits.iter().map(|s| whole(s)).collect();
            let direct: Vec<&str> = direct.iter().map(String::as_str).collect();
            let mut made = row(op, &[x], &direct).rounded(NORMED);
            for _ in 0..params {
                made = made.with(shape, Order::Same);
            }
            made
        };
        let layer = |shape: &[usize]| Op::LayerNorm(shape.to_vec());
        all.push(of(layer(&[3]), &[n, 3], &["B", "S0"], &[3]));
        all.push(of(layer(&[n]), &[2, n], &["B", "S0"], &[n]));
        all.push(of(layer(&[2, 3]), &[n, 2, 3], &["B", "S0"], &[2, 3]));
        all.push(of(layer(&[3]), &[2, n, 3], &["B", "S0", "S1"], &[3]));
        if params < 2 {
            all.push(of(Op::RmsNorm, &[n, 3], &["B", "S0"], &[3]));
            all.push(of(Op::RmsNorm, &[2, n, 3], &["B", "S0", "S1"], &[3]));
        }
        let group = Op::GroupNorm(2);
        all.push(of(group, &[n, 2, 2, 4], &["B", "S0"], &[4]));
        let batch = Op::BatchNorm(Act::Relu);
        all.push(of(batch.clone(), &[n, 3], &["B", "S0"], &[3]));
        let images = ["B", "S0", "S1", "S2"];
        all.push(of(batch.clone(), &[n, 2, 2, 2], &images, &[2]));
        all.push(of(batch.clone(), &[2, n, 2, 2], &images, &[2]));
        all.push(of(batch.clone(), &[3, n], &["B", "S0"], &[n]));
        if params != 1 {
            let mut residual = of(batch, &[n, 3], &["B B", "S0 S0"], &[3]);
            residual.operands.push((vec![n, 3], Kind::Grid));
            all.push(residual);
        }
    }
    all
}

fn pools(n: usize) -> Vec<Row> {
    let mut all = Vec::new();
    for shape in [[n, 4, 4, 2], [2, 4, 4, n]] {
        let of = |op: Op, more: &[&str]| row(op, &[&shape], &["B", "S0", "S3"]).also(true, more);
        all.push(of(Op::MaxPool(MaxPool2dOptions::new(2)), &[]));
        let strided = MaxPool2dOptions::new(3).stride(2).padding(1);
        all.push(of(Op::MaxPool(strided), &[]));
        all.push(of(Op::AdaptiveMax(2, 3), &[]));
        all.push(of(Op::AvgPool(AvgPool2dOptions::new(2)), &["P"]));
        let padded = AvgPool2dOptions::new(3).padding(1).exclude_padding();
        all.push(of(Op::AvgPool(padded), &["P"]).rounded(ROUNDED));
        all.push(of(Op::AdaptiveAvg(3, 2), &["P"]).rounded(ROUNDED));
        all.push(of(Op::GlobalAvg, &["P"]));
    }
    all
}

fn losses(n: usize) -> Vec<Row> {
    let mut all = Vec::new();
    let reductions = [
        Reduction::None,
        Reduction::Sum,
        Reduction::Mean,
        Reduction::Over(3.0),
    ];
    for r in reductions {
        for op in [Op::Nll(r), Op::CrossEntropy(r), Op::CrossEntropyWith(r)] {
            let of = |x: &[usize], splits: &[&str]| {
                let made = row(op.clone(), &[x], splits).also(true, &["B B"]);
                let made = made.choosing(&x[..x.len() - 1], x[x.len() - 1] as u32);
                match op {
                    Op::CrossEntropy(_) => made.rounded(NORMED).composite(),
                    _ => made.rounded(NORMED),
                }
            };
            all.push(of(&[n, 4], &["S0 S0"]));
            all.push(of(&[2, n, 4], &["S0 S0", "S1 S1"]));
        }
        for op in [Op::Mse(r), Op::L1(r), Op::Bce(r)] {
            for shape in [[n, 3], [2, n]] {
                let direct = ["B B", "S0 S0", "S1 S1"];
                let made = row(op.clone(), &[&shape, &shape], &direct);
                all.push(made.kind(1, Kind::Target).rounded(NORMED));
            }
        }
        for shape in [[n, 3], [2, n]] {
            let made = row(Op::Shares(r), &[&shape, &shape], &["B B", "S0 S0"]);
            all.push(made.kind(1, Kind::Target).rounded(NORMED));
        }
    }
    all
}
