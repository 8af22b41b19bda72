//! Operations on tensors against finite differences in f64, and bits on any
//! number of threads.

use crate::common::differences::{check, input, param};
use crate::common::noise;
use phalanx_nn::layers::Conv2dOptions;
use phalanx_nn::{Grads, Layout, Scope, Seed, StepKey, Tape, Tensor, Threads};

/// Every index of `shape`, row-major.
fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![vec![]], |all, &n| {
        all.iter()
            .flat_map(|i| (0..n).map(move |k| [&i[..], &[k]].concat()))
            .collect()
    })
}

/// Place of `index` in an array of `shape` that is stretched to more.
fn place(shape: &[usize], index: &[usize]) -> usize {
    let skip = index.len() - shape.len();
    shape
        .iter()
        .zip(&index[skip..])
        .fold(0, |at, (&n, &i)| at * n + i.min(n - 1))
}

#[test]
fn arithmetic_stretches() {
    let cases: [(&[usize], &[usize], &[usize]); 6] = [
        (&[2, 3, 4], &[2, 3, 4], &[2, 3, 4]),
        (&[2, 3, 4], &[4], &[2, 3, 4]),
        (&[3, 1], &[2, 1, 5], &[2, 3, 5]),
        (&[2, 3, 4], &[2, 1, 4], &[2, 3, 4]),
        (&[], &[2, 2], &[2, 2]),
        (&[2, 3], &[1, 1], &[2, 3]),
    ];
    for (a, b, to) in cases {
        let mut leaves = [input(a, 1), input(b, 2)];
        // Away from zero, for the quotients.
        leaves[1].values.iter_mut().for_each(|v| *v += 2.0);
        let both = |v: &[Vec<f64>], f: fn(f64, f64) -> f64| -> Vec<f64> {
            let pair = |i: &Vec<usize>| f(v[0][place(a, i)], v[1][place(b, i)]);
            indices(to).iter().map(pair).collect()
        };
        check(
            "add",
            &leaves,
            |g, _| g.x(0).add(g.x(1)),
            |v| both(v, |a, b| a + b),
        );
        check(
            "sub",
            &leaves,
            |g, _| g.x(0).sub(g.x(1)),
            |v| both(v, |a, b| a - b),
        );
        check(
            "mul",
            &leaves,
            |g, _| g.x(0).mul(g.x(1)),
            |v| both(v, |a, b| a * b),
        );
        check(
            "div",
            &leaves,
            |g, _| g.x(0).div(g.x(1)),
            |v| both(v, |a, b| a / b),
        );
        check(
            "div, turned",
            &leaves,
            |g, _| {
                let (a, b) = (g.x(0), g.x(1));
                b.div(a)
            },
            |v| both(v, |a, b| b / a),
        );
    }
    check(
        "a square",
        &[input(&[5], 1)],
        |g, _| {
            let x = g.x(0);
            x.share().mul(x)
        },
        |v| v[0].iter().map(|x| x * x).collect(),
    );
}

#[test]
fn reductions() {
    let shape = [3, 2, 4, 5];
    let cases: [&[usize]; 6] = [&[], &[3], &[0], &[1, 2], &[0, 3], &[0, 1, 2]];
    for dims in cases {
        let over = |i: usize| dims.is_empty() || dims.contains(&i);
        let kept: Vec<usize> = (0..4).map(|i| if over(i) { 1 } else { shape[i] }).collect();
        let fold = |v: &[f64], f: fn(f64, f64) -> f64, start: f64| {
            let mut out = vec![start; kept.iter().product()];
            for (i, &v) in indices(&shape).iter().zip(v) {
                let at = place(&kept, i);
                out[at] = f(out[at], v);
            }
            out
        };
        let leaf = [input(&shape, 3)];
        let n = 120.0 / kept.iter().product::<usize>() as f64;
        for keep in [false, true] {
            check(
                "sum",
                &leaf,
                |g, _| g.x(0).sum(dims, keep),
                |v| fold(&v[0], |a, b| a + b, 0.0),
            );
            check(
                "mean",
                &leaf,
                |g, _| g.x(0).mean(dims, keep),
                |v| {
                    fold(&v[0], |a, b| a + b, 0.0)
                        .iter()
                        .map(|s| s / n)
                        .collect()
                },
            );
            check(
                "max",
                &leaf,
                |g, _| g.x(0).max(dims, keep),
                |v| fold(&v[0], f64::max, f64::NEG_INFINITY),
            );
        }
    }
}

#[test]
fn equal_largest_elements_share_the_gradient() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.variable(&[1.0, 3.0, 3.0, 2.0], &[4]).unwrap();
    let seen = x.share();
    let y = x.max(&[], false).unwrap();
    y.backward(&mut Grads::like(&params)).unwrap();
    assert_eq!(seen.grad().unwrap(), [0.0, 0.5, 0.5, 0.0]);
}

/// As `torch.amax` has it.
#[test]
fn of_not_a_number_there_is_no_largest_to_take_the_gradient() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let values = [1.0, f32::NAN, 2.0, 5.0, f32::INFINITY, f32::INFINITY];
    let x = step.variable(&values, &[2, 3]).unwrap();
    let seen = x.share();
    let y = x.max(&[1], false).unwrap().sum(&[], false).unwrap();
    y.backward(&mut Grads::like(&params)).unwrap();
    let grad = seen.grad().unwrap();
    assert!(grad[..3].iter().all(|g| g.is_nan()), "{grad:?}");
    assert_eq!(grad[3..], [0.0, 0.5, 0.5]);
}

#[test]
fn movement() {
    let shape = [2, 3, 4];
    let leaf = [input(&shape, 1)];
    for order in [[0, 1, 2], [2, 0, 1], [0, 2, 1], [1, 0, 2], [2, 1, 0]] {
        let to: Vec<usize> = order.iter().map(|&o| shape[o]).collect();
        check(
            "permute",
            &leaf,
            |g, _| g.x(0).permute(&order),
            |v| {
                let from = |i: &Vec<usize>| {
                    let mut index = vec![0; 3];
                    (0..3).for_each(|k| index[order[k]] = i[k]);
                    v[0][place(&shape, &index)]
                };
                indices(&to).iter().map(from).collect()
            },
        );
    }
    check(
        "transpose",
        &leaf,
        |g, _| g.x(0).transpose(1, 2)?.transpose(2, 1),
        |v| v[0].clone(),
    );
    for dim in 0..3 {
        let range = 1..shape[dim];
        let picked = |v: &[f64], inside: &dyn Fn(usize) -> bool| -> Vec<f64> {
            let all = indices(&shape);
            let kept = all.iter().zip(v).filter(|(i, _)| inside(i[dim]));
            kept.map(|(_, &v)| v).collect()
        };
        check(
            "slice",
            &leaf,
            |g, _| g.x(0).slice(dim, range.clone()),
            |v| picked(&v[0], &|i| range.contains(&i)),
        );
        // What is cut apart and joined is what it was; the second operand comes in between.
        let leaves = [input(&shape, 1), input(&shape, 2)];
        let mut to = shape;
        to[dim] *= 2;
        check(
            "concat",
            &leaves,
            |g, step| {
                let (a, b) = (g.x(0), g.x(1));
                let (first, rest) = (a.share().slice(dim, 0..1)?, a.slice(dim, 1..shape[dim])?);
                step.concat(vec![first, b, rest], dim)
            },
            |v| {
                let value = |i: &Vec<usize>| {
                    let (mut i, n) = (i.clone(), shape[dim]);
                    let second = (1..=n).contains(&i[dim]);
                    i[dim] -= if second {
                        1
                    } else if i[dim] > n {
                        n
                    } else {
                        0
                    };
                    v[usize::from(second)][place(&shape, &i)]
                };
                indices(&to).iter().map(value).collect()
            },
        );
    }
}

#[test]
fn matrix_products() {
    for (outer, m, k, n) in [(vec![], 3, 4, 2), (vec![2], 3, 2, 4), (vec![2, 3], 1, 5, 2)] {
        let shape = |a, b| [&outer[..], &[a, b]].concat();
        let count: usize = outer.iter().product();
        let plain = |v: &[Vec<f64>], turned: bool| -> Vec<f64> {
            indices(&[count, m, n])
                .iter()
                .map(|i| {
                    let at = |p: usize| if turned { i[2] * k + p } else { p * n + i[2] };
                    let term = |p| v[0][(i[0] * m + i[1]) * k + p] * v[1][i[0] * k * n + at(p)];
                    (0..k).map(term).sum()
                })
                .collect()
        };
        let leaves = [input(&shape(m, k), 1), input(&shape(k, n), 2)];
        check(
            "bmm",
            &leaves,
            |g, _| g.x(0).bmm(g.x(1)),
            |v| plain(v, false),
        );
        let leaves = [input(&shape(m, k), 1), input(&shape(n, k), 2)];
        check(
            "bmm, transposed",
            &leaves,
            |g, _| g.x(0).bmm_transposed(g.x(1)),
            |v| plain(v, true),
        );
    }
}

#[test]
fn attention() {
    let (samples, heads, each) = (2, 3, 2);
    let width = heads * each;
    for (queries, keys, causal) in [
        (5, 5, true),
        (5, 5, false),
        (1, 1, true),
        (3, 7, false),
        (0, 2, false),
        (2, 0, false),
    ] {
        let plain = |v: &[Vec<f64>]| -> Vec<f64> {
            let mut y = vec![0.0; samples * queries * width];
            for (b, h) in indices(&[samples, heads]).iter().map(|i| (i[0], i[1])) {
                let at =
                    |rows: usize, row: usize, c: usize| (b * rows + row) * width + h * each + c;
                for i in 0..queries {
                    let score = |j: usize| -> f64 {
                        let term = |c| v[0][at(queries, i, c)] * v[1][at(keys, j, c)];
                        (0..each).map(term).sum::<f64>() / (each as f64).sqrt()
                    };
                    let seen = if causal { i + 1 } else { keys };
                    let weights: Vec<f64> = (0..seen).map(|j| score(j).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    for c in 0..each {
                        let term = |(j, w): (usize, &f64)| w / sum * v[2][at(keys, j, c)];
                        y[at(queries, i, c)] = weights.iter().enumerate().map(term).sum();
                    }
                }
            }
            y
        };
        let of_keys = |seed| input(&[samples, keys, width], seed);
        let leaves = [input(&[samples, queries, width], 1), of_keys(2), of_keys(3)];
        check(
            "attention",
            &leaves,
            |g, _| g.x(0).attention(g.x(1), g.x(2), heads, causal, None),
            plain,
        );
    }
}

/// (N, L, E) to (N, heads, L, E / heads).
fn by_heads(x: Tensor<'_>, heads: usize) -> Tensor<'_> {
    let shape = x.shape();
    let [samples, rows, width] = *shape else {
        unreachable!("it has three dimensions");
    };
    let x = x.reshape(&[samples, rows, heads, width / heads]).unwrap();
    x.permute(&[0, 2, 1, 3]).unwrap()
}

#[test]
fn attention_has_the_bits_of_its_operations_one_after_the_other() {
    let (samples, heads, each) = (2, 2, 5);
    let width = heads * each;
    let params = Scope::new(Seed(1)).build().unwrap();
    for (queries, keys, causal, dropout) in [
        (1, 1, true, None),
        (63, 63, true, None),
        (130, 130, true, None),
        (65, 300, false, None),
        (64, 64, true, Some(0.2)),
        (131, 131, true, Some(0.5)),
        (65, 300, false, Some(0.1)),
        (9, 9, true, Some(1.0)),
        (9, 9, true, Some(0.0)),
    ] {
        let [q, k, v] = [(queries, 1), (keys, 2), (keys, 3)]
            .map(|(rows, seed)| (noise(samples * rows * width, seed), [samples, rows, width]));
        let run = |threads: usize, fused: bool| {
            let mut tape = Tape::new(Threads(threads));
            let mut grads = Grads::like(&params);
            let step = tape.step(&params, StepKey::new(0, 0).samples(&[41, 7]));
            let all = [&q, &k, &v].map(|(x, shape)| step.variable(x, shape).unwrap());
            let [q, k, v] = all.each_ref().map(|x| x.share());
            let y = if fused {
                q.attention(k, v, heads, causal, dropout).unwrap()
            } else {
                let q = by_heads(q, heads)
                    .scale(1.0 / (each as f32).sqrt())
                    .unwrap();
                let mut scores = q.bmm_transposed(by_heads(k, heads)).unwrap();
                if causal {
                    let closed = |i: usize| i % keys > i / keys;
                    let mask = (0..queries * keys)
                        .map(|i| if closed(i) { f32::NEG_INFINITY } else { 0.0 });
                    let mask: Vec<f32> = mask.collect();
                    scores = scores
                        .add(step.input(&mask, &[queries, keys]).unwrap())
                        .unwrap();
                }
                let mut weights = scores.softmax(3).unwrap();
                if let Some(p) = dropout {
                    weights = weights.dropout(p).unwrap();
                }
                let y = weights.bmm(by_heads(v, heads)).unwrap();
                let y = y.permute(&[0, 2, 1, 3]).unwrap();
                y.reshape(&[samples, queries, width]).unwrap()
            };
            let mut bits: Vec<u32> = y.data().iter().map(|v| v.to_bits()).collect();
            // Another random operation: both count the same ones before it.
            let loss = y.share().mul(y.dropout(0.5).unwrap()).unwrap();
            let loss = loss.mean(&[], false).unwrap();
            loss.backward(&mut grads).unwrap();
            for x in &all {
                bits.extend(x.grad().unwrap().iter().map(|v| v.to_bits()));
            }
            bits
        };
        let want = run(1, false);
        for threads in [1, 2, 4] {
            assert!(
                run(threads, true) == want,
                "{queries} x {keys}, dropout {dropout:?}, {threads} threads"
            );
        }
    }
}

fn erf(x: f64) -> f64 {
    // A series that converges everywhere.
    let mut term = x;
    (1..80).fold(x, |sum, n| {
        term *= -x * x / f64::from(n);
        sum + term / f64::from(2 * n + 1)
    }) * std::f64::consts::FRAC_2_SQRT_PI
}

#[test]
fn activations() {
    let mut leaf = [input(&[40], 1)];
    leaf[0].values.iter_mut().for_each(|v| *v *= 4.0);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let six = |x: f64| x.clamp(0.0, 6.0);
    macro_rules! each {
        ($($name:ident($($arg:expr),*) = $f:expr;)*) => {$(
            check(stringify!($name), &leaf, |g, _| g.x(0).$name($($arg),*), |v| v[0].iter().map(|&x| ($f)(x)).collect());
        )*};
    }
    each! {
        relu6() = six;
        leaky_relu(0.125) = |x: f64| if x > 0.0 { x } else { 0.125 * x };
        gelu() = |x: f64| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()));
        gelu_tanh() = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh());
        silu() = |x: f64| x * sigmoid(x);
        hardswish() = |x: f64| x * six(x + 3.0) / 6.0;
        hardsigmoid() = |x: f64| six(x + 3.0) / 6.0;
        sigmoid() = sigmoid;
        tanh() = f64::tanh;
        exp() = f64::exp;
        abs() = f64::abs;
        pow(2.0) = |x: f64| x * x;
        pow(3.0) = |x: f64| x.powi(3);
        clamp(-1.5, 0.75) = |x: f64| x.clamp(-1.5, 0.75);
    }
    leaf[0].values.iter_mut().for_each(|v| *v = v.abs() + 0.2);
    each! {
        log() = f64::ln;
        sqrt() = f64::sqrt;
        pow(-0.5) = |x: f64| 1.0 / x.sqrt();
        pow(1.7) = |x: f64| x.powf(1.7);
        pow(0.0) = |_: f64| 1.0;
    }
}

#[test]
fn functions_at_their_ends() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let of = |values: &[f32]| step.input(values, &[values.len()]).unwrap();
    let tiny = f32::from_bits(3);
    let y = of(&[
        0.0,
        -0.0,
        -1.0,
        f32::INFINITY,
        1.0,
        f32::NAN,
        tiny,
        f32::MAX,
    ]);
    let y = y.log().unwrap().to_vec();
    assert_eq!(y[..2], [f32::NEG_INFINITY; 2]);
    assert!(y[2].is_nan() && y[5].is_nan());
    assert_eq!(y[3..5], [f32::INFINITY, 0.0]);
    assert!((y[6] - tiny.ln()).abs() < 1e-5 && (y[7] - f32::MAX.ln()).abs() < 1e-5);
    let y = of(&[-4.0, 0.0, f32::NAN]).clamp(-1.0, 2.0).unwrap();
    assert!(y.share().to_vec()[..2] == [-1.0, 0.0] && y.to_vec()[2].is_nan());
    let y = of(&[-2.0, -2.0]).pow(0.5).unwrap().to_vec();
    assert!(y.iter().all(|v| v.is_nan()));
    assert_eq!(of(&[-2.0]).pow(-3.0).unwrap().to_vec(), [-0.125]);
}

#[test]
fn softmax_along_any_dimension() {
    let shape = [3, 4, 5];
    for dim in 0..3 {
        let plain = |v: &[f64], log: bool| -> Vec<f64> {
            let all = indices(&shape);
            let mut kept = shape;
            kept[dim] = 1;
            let mut sums = vec![0.0; 60 / shape[dim]];
            let pairs = || all.iter().zip(v);
            pairs().for_each(|(i, &v)| sums[place(&kept, i)] += v.exp());
            pairs()
                .map(|(i, &v)| {
                    let sum: f64 = sums[place(&kept, i)];
                    if log { v - sum.ln() } else { v.exp() / sum }
                })
                .collect()
        };
        let leaf = [input(&shape, 1)];
        check(
            "softmax",
            &leaf,
            |g, _| g.x(0).softmax(dim),
            |v| plain(&v[0], false),
        );
        check(
            "log-softmax",
            &leaf,
            |g, _| g.x(0).log_softmax_dim(dim),
            |v| plain(&v[0], true),
        );
    }
}

#[test]
fn normalisations() {
    let plain = |v: &[Vec<f64>], n: usize, pixels: usize, c: usize, groups: usize| {
        let (mut y, width) = (v[0].clone(), c / groups);
        for image in 0..n {
            for group in 0..groups {
                let at = |p: usize, i: usize| (image * pixels + p) * c + group * width + i;
                let places: Vec<usize> = (0..pixels)
                    .flat_map(|p| (0..width).map(move |i| at(p, i)))
                    .collect();
                let count = places.len() as f64;
                let mean = places.iter().map(|&i| v[0][i]).sum::<f64>() / count;
                let var = places
                    .iter()
                    .map(|&i| (v[0][i] - mean).powi(2))
                    .sum::<f64>()
                    / count;
                for i in places {
                    y[i] = (v[0][i] - mean) / (var + 1e-3).sqrt() * v[1][i % c] + v[2][i % c];
                }
            }
        }
        y
    };
    let same = Layout::Same;
    let leaves = [
        input(&[2, 3, 20], 1),
        param(&[20], same, 2),
        param(&[20], same, 3),
    ];
    check(
        "layer norm",
        &leaves,
        |g, _| {
            let affine = (Some(g.p(1)), Some(g.p(2)));
            g.x(0).layer_norm(&[20], affine, 1e-3)
        },
        |v| plain(v, 6, 1, 20, 1),
    );
    let rms = |v: &[Vec<f64>]| -> Vec<f64> {
        let rows = v[0].chunks(20).map(|x| {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / 20.0;
            let weight = |i: usize| v.get(1).map_or(1.0, |w| w[i]);
            let y = move |(i, x): (usize, &f64)| x / (mean + 1e-3).sqrt() * weight(i);
            x.iter().enumerate().map(y).collect::<Vec<f64>>()
        });
        rows.flatten().collect()
    };
    check(
        "rms norm",
        &leaves[..2],
        |g, _| g.x(0).rms_norm(Some(g.p(1)), 1e-3),
        rms,
    );
    check(
        "rms norm without weight",
        &leaves[..1],
        |g, _| g.x(0).rms_norm(None, 1e-3),
        rms,
    );
    let leaves = [
        input(&[2, 2, 3, 6], 1),
        param(&[6], same, 2),
        param(&[6], same, 3),
    ];
    for groups in [1, 3, 6] {
        check(
            "group norm",
            &leaves,
            |g, _| {
                let affine = (Some(g.p(1)), Some(g.p(2)));
                g.x(0).group_norm(groups, affine, 1e-3)
            },
            |v| plain(v, 2, 6, 6, groups),
        );
    }
}

#[test]
fn transposed_convolution_and_embedding() {
    // (N, H, W, C) = (1, 3, 2, 4), two groups, 3 x 2 kernel, stride 2, padding 1, one row more.
    let leaves = [
        input(&[1, 3, 2, 4], 1),
        param(&[4, 3, 3, 2], Layout::Conv, 2),
        param(&[6], Layout::Same, 3),
    ];
    let options = Conv2dOptions::rect(3, 2).stride(2).padding(1).groups(2);
    check(
        "transposed convolution",
        &leaves,
        |g, _| {
            g.x(0)
                .conv_transpose2d(g.p(1), Some(g.p(2)), options, [1, 0])
        },
        |v| {
            let (oh, ow) = (6, 2);
            let mut y: Vec<f64> = (0..oh * ow * 6).map(|i| v[2][i % 6]).collect();
            for i in indices(&[3, 2, 4, 3, 3, 2]) {
                let (oy, ox) = (i[0] * 2 + i[4], i[1] * 2 + i[5]);
                if (1..=oh).contains(&oy) && (1..=ow).contains(&ox) {
                    let to = ((oy - 1) * ow + ox - 1) * 6 + i[2] / 2 * 3 + i[3];
                    let x = v[0][(i[0] * 2 + i[1]) * 4 + i[2]];
                    y[to] += x * v[1][((i[2] * 3 + i[3]) * 3 + i[4]) * 2 + i[5]];
                }
            }
            y
        },
    );
    let leaves = [param(&[5, 3], Layout::Same, 1)];
    let numbers = [4, 0, 4, 1];
    check(
        "embedding",
        &leaves,
        |g, step| step.embedding(g.p(0), &numbers, &[2, 2], None),
        |v| {
            numbers
                .iter()
                .flat_map(|&n| v[0][n as usize * 3..][..3].to_vec())
                .collect()
        },
    );
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut scope = Scope::new(Seed(1));
    let attention = phalanx_nn::layers::MultiHeadAttention::new(scope.enter("a"), 48, 4);
    let norm = phalanx_nn::layers::LayerNorm::new(scope.enter("n"), &[48]);
    let conv = phalanx_nn::layers::ConvTranspose2d::new(scope.enter("t"), 48, 32, 4);
    let params = scope.build().unwrap();
    let x = noise(9 * 40 * 48, 1);
    let run = |threads| {
        let mut tape = Tape::new(Threads(threads));
        let mut grads = Grads::like(&params);
        let mut values = vec![];
        for _ in 0..2 {
            let step = tape.step(&params, StepKey::new(0, 0));
            let x = step.variable(&x, &[9, 40, 48]).unwrap();
            let y = attention
                .forward(x.share(), true)
                .unwrap()
                .add(x.share())
                .unwrap();
            let y = norm.forward(y).unwrap().gelu().unwrap();
            let y = conv.forward(y.reshape(&[9, 8, 5, 48]).unwrap()).unwrap();
            let y = y.relu6().unwrap();
            let loss = y.share().mul(y).unwrap().mean(&[], false).unwrap();
            values.push(loss.item().unwrap().to_bits());
            loss.backward(&mut grads).unwrap();
            values.extend(x.grad().unwrap().iter().map(|v| v.to_bits()));
        }
        values.extend(grads.flat().iter().map(|v| v.to_bits()));
        values
    };
    let one = run(1);
    assert!(one == run(2) && one == run(4));
}

#[test]
fn what_does_not_fit_is_named() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = || step.input(&[0.0; 6], &[2, 3]).unwrap();
    let y = || step.input(&[0.0; 4], &[2, 2]).unwrap();
    let z = || step.input(&[0.0; 6], &[1, 2, 3]).unwrap();
    let errors = [
        (x().add(y()).unwrap_err(), "[2, 3] and [2, 2]"),
        (x().bmm(x()).unwrap_err(), "bmm"),
        (
            x().attention(x(), x(), 1, false, None).unwrap_err(),
            "attention needs",
        ),
        (
            z().attention(z(), z(), 1, false, Some(1.5)).unwrap_err(),
            "probability 1.5",
        ),
        (x().sum(&[2], false).unwrap_err(), "2 is not there"),
        (x().sum(&[1, 1], false).unwrap_err(), "named twice"),
        (x().permute(&[0, 0]).unwrap_err(), "named once"),
        (x().transpose(0, 2).unwrap_err(), "transpose"),
        (x().slice(1, 2..4).unwrap_err(), "slice 2..4"),
        (step.concat(vec![x(), y()], 0).unwrap_err(), "concat"),
        (step.concat(vec![], 0).unwrap_err(), "no tensors"),
        (x().softmax(2).unwrap_err(), "dimension 2"),
        (
            x().l1_loss(&[0.0], phalanx_nn::Reduction::Mean)
                .unwrap_err(),
            "1 targets",
        ),
        (
            x().layer_norm(&[2], (None, None), 1e-5).unwrap_err(),
            "layer_norm",
        ),
        (
            x().group_norm(2, (None, None), 1e-5).unwrap_err(),
            "2 groups",
        ),
    ];
    for (e, part) in errors {
        assert!(e.to_string().contains(part), "{e}");
    }
}

#[test]
fn operations_are_called_by_what_they_compute() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let row = || step.variable(&[1.0, 2.0], &[2]).unwrap();
    let many = || step.variable(&[1.0; 4], &[2, 2]).unwrap();
    let results = [
        many().add(row()),
        many().sub(row()),
        many().mul(row()),
        many().div(row()),
        many().add(many()),
        row().gelu_tanh(),
        row().sigmoid(),
    ];
    assert!(results.iter().all(Result::is_ok));
    let names: Vec<&str> = step.graph().iter().map(|node| node.operation).collect();
    assert_eq!(
        names,
        ["Add", "Sub", "Mul", "Div", "Add", "GeluTanh", "Sigmoid"]
    );
}
