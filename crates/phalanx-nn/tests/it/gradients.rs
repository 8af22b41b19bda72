//! Every operation's backward against central differences of a plain forward
//! in f64, written here independently of the crate.

use crate::common::differences::{Given, check, input, param};
use crate::common::{Recorder, noise};
use phalanx_nn::layers::{
    Act, AvgPool2dOptions, BatchNormOptions, Conv2dOptions, MaxPool2dOptions,
};
use phalanx_nn::{
    CustomOp, ErrorKind, GradView, Init, Layout, Reduction, Result, Scope, Seed, StepKey, Tape,
    Tensor, Threads,
};

// The plain forwards, in f64. Images are (N, H, W, C).

fn relu(x: Vec<f64>) -> Vec<f64> {
    x.into_iter().map(|v| v.max(0.0)).collect()
}

/// `w`: [out][in].
fn linear(x: &[f64], w: &[f64], b: Option<&[f64]>, inp: usize, out: usize) -> Vec<f64> {
    x.chunks(inp)
        .flat_map(|row| {
            (0..out).map(move |o| {
                b.map_or(0.0, |b| b[o])
                    + row
                        .iter()
                        .zip(&w[o * inp..])
                        .map(|(x, w)| x * w)
                        .sum::<f64>()
            })
        })
        .collect()
}

struct Conv {
    n: usize,
    h: usize,
    w: usize,
    cin: usize,
    cout: usize,
    k: (usize, usize),
    s: usize,
    p: usize,
    d: usize,
    g: usize,
}

impl Conv {
    fn out(&self) -> (usize, usize) {
        let size = |i, k| (i + 2 * self.p - self.d * (k - 1) - 1) / self.s + 1;
        (size(self.h, self.k.0), size(self.w, self.k.1))
    }

    /// `w`: [out][in / g][kh][kw].
    fn run(&self, x: &[f64], w: &[f64], b: Option<&[f64]>) -> Vec<f64> {
        let ((oh, ow), gi, go) = (self.out(), self.cin / self.g, self.cout / self.g);
        let mut y = vec![0.0; self.n * oh * ow * self.cout];
        for (i, y) in y.iter_mut().enumerate() {
            let (o, ox, oy, n) = (
                i % self.cout,
                i / self.cout % ow,
                i / self.cout / ow % oh,
                i / self.cout / ow / oh,
            );
            let mut sum = b.map_or(0.0, |b| b[o]);
            for c in 0..gi {
                for ky in 0..self.k.0 {
                    for kx in 0..self.k.1 {
                        let yy = (oy * self.s + ky * self.d) as isize - self.p as isize;
                        let xx = (ox * self.s + kx * self.d) as isize - self.p as isize;
                        if yy >= 0 && xx >= 0 && (yy as usize) < self.h && (xx as usize) < self.w {
                            let pixel = (n * self.h + yy as usize) * self.w + xx as usize;
                            sum += x[pixel * self.cin + o / go * gi + c]
                                * w[((o * gi + c) * self.k.0 + ky) * self.k.1 + kx];
                        }
                    }
                }
            }
            *y = sum;
        }
        y
    }
}

fn max_pool(
    x: &[f64],
    (n, h, w, c): (usize, usize, usize, usize),
    k: usize,
    s: usize,
    p: usize,
) -> Vec<f64> {
    let (oh, ow) = ((h + 2 * p - k) / s + 1, (w + 2 * p - k) / s + 1);
    let mut y = vec![f64::NEG_INFINITY; n * oh * ow * c];
    for (i, y) in y.iter_mut().enumerate() {
        let (ch, ox, oy, im) = (i % c, i / c % ow, i / c / ow % oh, i / c / ow / oh);
        for ky in 0..k {
            for kx in 0..k {
                let (yy, xx) = ((oy * s + ky).wrapping_sub(p), (ox * s + kx).wrapping_sub(p));
                if yy < h && xx < w {
                    *y = y.max(x[((im * h + yy) * w + xx) * c + ch]);
                }
            }
        }
    }
    y
}

fn flatten(x: &[f64], (n, p, c): (usize, usize, usize)) -> Vec<f64> {
    let mut y = vec![0.0; x.len()];
    for i in 0..n {
        for k in 0..c {
            for q in 0..p {
                y[(i * c + k) * p + q] = x[(i * p + q) * c + k];
            }
        }
    }
    y
}

fn log_softmax(x: &[f64], classes: usize) -> Vec<f64> {
    x.chunks(classes)
        .flat_map(|row| {
            let sum = row.iter().map(|v| v.exp()).sum::<f64>().ln();
            row.iter().map(move |v| v - sum)
        })
        .collect()
}

fn nll(x: &[f64], classes: usize, labels: &[u32], divisor: f64) -> Vec<f64> {
    vec![
        x.chunks(classes)
            .zip(labels)
            .map(|(row, &l)| -row[l as usize])
            .sum::<f64>()
            / divisor,
    ]
}

#[test]
fn elementwise_operations() {
    let x = [input(&[3, 7], 1)];
    check("relu", &x, |g, _| g.x(0).relu(), |v| relu(v[0].clone()));
    check(
        "scale",
        &x,
        |g, _| g.x(0).scale(-2.5),
        |v| v[0].iter().map(|x| x * -2.5).collect(),
    );
    check(
        "reshape",
        &x,
        |g, _| g.x(0).reshape(&[7, 3])?.relu(),
        |v| relu(v[0].clone()),
    );
    let two = [input(&[3, 7], 1), input(&[3, 7], 2)];
    check(
        "add",
        &two,
        |g, _| g.x(0).add(g.x(1)),
        |v| v[0].iter().zip(&v[1]).map(|(a, b)| a + b).collect(),
    );
    check(
        "a value used three times",
        &x,
        |g, _| {
            let x = g.x(0);
            let (a, b) = (x.share(), x.share());
            x.relu()?.add(a.scale(3.0)?)?.add(b)
        },
        |v| v[0].iter().map(|x| x.max(0.0) + 4.0 * x).collect(),
    );
}

#[test]
fn linear_layers() {
    let leaves = [
        input(&[4, 5], 1),
        param(&[3, 5], Layout::Same, 2),
        param(&[3], Layout::Same, 3),
    ];
    check(
        "linear",
        &leaves,
        |g, _| g.x(0).linear(g.p(1), Some(g.p(2)), Act::None),
        |v| linear(&v[0], &v[1], Some(&v[2]), 5, 3),
    );
    check(
        "linear with relu",
        &leaves,
        |g, _| g.x(0).linear(g.p(1), Some(g.p(2)), Act::Relu),
        |v| relu(linear(&v[0], &v[1], Some(&v[2]), 5, 3)),
    );
    check(
        "matmul in three dimensions, [in, out]",
        &[input(&[2, 2, 5], 1), param(&[5, 2], Layout::Same, 2)],
        |g, _| g.x(0).matmul(g.p(1)),
        |v| {
            let w: Vec<f64> = (0..10).map(|i| v[1][i % 5 * 2 + i / 5]).collect();
            linear(&v[0], &w, None, 5, 2)
        },
    );
    check(
        "one parameter used twice",
        &[
            input(&[2, 3], 1),
            param(&[3, 3], Layout::Same, 2),
            param(&[3], Layout::Same, 3),
        ],
        |g, _| {
            let y = g.x(0).linear(g.p(1), Some(g.p(2)), Act::Relu)?;
            y.linear(g.p(1), Some(g.p(2)), Act::None)
        },
        |v| {
            let y = relu(linear(&v[0], &v[1], Some(&v[2]), 3, 3));
            linear(&y, &v[1], Some(&v[2]), 3, 3)
        },
    );
}

#[test]
fn convolutions() {
    let base = Conv {
        n: 2,
        h: 6,
        w: 7,
        cin: 2,
        cout: 3,
        k: (3, 3),
        s: 1,
        p: 0,
        d: 1,
        g: 1,
    };
    let cases = [
        ("few channels", Conv { ..base }),
        ("over the image", Conv { cin: 6, ..base }),
        (
            "over the image, padded",
            Conv {
                cin: 6,
                p: 1,
                ..base
            },
        ),
        (
            "1x1",
            Conv {
                cin: 16,
                k: (1, 1),
                ..base
            },
        ),
        (
            "5x2, padded",
            Conv {
                cin: 8,
                k: (5, 2),
                p: 1,
                ..base
            },
        ),
        ("stride", Conv { s: 2, p: 1, ..base }),
        (
            "groups",
            Conv {
                cin: 4,
                cout: 6,
                g: 2,
                p: 1,
                ..base
            },
        ),
        (
            "depthwise",
            Conv {
                cin: 4,
                cout: 4,
                g: 4,
                p: 1,
                ..base
            },
        ),
        (
            "depthwise, a vector of channels and some",
            Conv {
                n: 1,
                cin: 18,
                cout: 18,
                g: 18,
                p: 1,
                s: 2,
                ..base
            },
        ),
        (
            "depthwise in registers",
            Conv {
                n: 1,
                h: 4,
                w: 5,
                cin: 16,
                cout: 16,
                g: 16,
                p: 1,
                ..base
            },
        ),
        (
            "dilation",
            Conv {
                d: 2,
                p: 2,
                s: 2,
                ..base
            },
        ),
    ];
    for (name, c) in cases {
        let leaves = [
            input(&[c.n, c.h, c.w, c.cin], 1),
            param(&[c.cout, c.cin / c.g, c.k.0, c.k.1], Layout::Conv, 2),
            param(&[c.cout], Layout::Same, 3),
        ];
        let o = Conv2dOptions::rect(c.k.0, c.k.1)
            .stride_rect(c.s, c.s)
            .padding_rect(c.p, c.p)
            .dilation_rect(c.d, c.d)
            .groups(c.g);
        check(
            name,
            &leaves,
            |g, _| g.x(0).conv2d(g.p(1), Some(g.p(2)), o, Act::None),
            |v| c.run(&v[0], &v[1], Some(&v[2])),
        );
        check(
            &format!("{name}, relu, no bias"),
            &leaves[..2],
            |g, _| g.x(0).conv2d(g.p(1), None, o, Act::Relu),
            |v| relu(c.run(&v[0], &v[1], None)),
        );
    }
    // Images twelve times as large reach the upper bound.
    check(
        "relu6 behind a convolution",
        &[
            input(&[2, 4, 4, 3], 1),
            param(&[5, 3, 1, 1], Layout::Conv, 2),
        ],
        |g, _| {
            let x = g.x(0).scale(12.0)?;
            x.conv2d(g.p(1), None, Conv2dOptions::new(1), Act::Relu6)
        },
        |v| {
            let w = &v[1];
            v[0].chunks(3)
                .flat_map(|x| (0..5).map(move |o| (0..3).map(|c| 12.0 * x[c] * w[o * 3 + c]).sum()))
                .map(|y: f64| y.clamp(0.0, 6.0))
                .collect()
        },
    );
}

#[test]
fn pooling_and_flatten() {
    let x = [input(&[2, 6, 5, 3], 1)];
    for (k, s, p) in [(2, 2, 0), (3, 2, 1), (3, 1, 0)] {
        let o = MaxPool2dOptions::new(k).stride(s).padding(p);
        check(
            "max-pool",
            &x,
            move |g, _| g.x(0).max_pool2d(o),
            |v| max_pool(&v[0], (2, 6, 5, 3), k, s, p),
        );
    }
    let wide = [input(&[1, 4, 4, 35], 1)];
    check(
        "max-pool, many channels",
        &wide,
        |g, _| g.x(0).max_pool2d(2),
        |v| max_pool(&v[0], (1, 4, 4, 35), 2, 2, 0),
    );
    check(
        "flatten",
        &x,
        |g, _| g.x(0).flatten(),
        |v| flatten(&v[0], (2, 30, 3)),
    );
}

#[test]
fn dropout() {
    // The mask is read off the output; then it is a plain product.
    let x = [input(&[3, 40, 2, 2], 1)];
    for channels in [false, true] {
        let params = Scope::new(Seed(0)).build().unwrap();
        let mut tape = Tape::new(Threads(1));
        let mask: Vec<f64> = {
            let step = tape.step(&params, StepKey::new(1, 2).seed(3));
            let t = step.input(&[1.0; 480], &[3, 40, 2, 2]).unwrap();
            let t = if channels {
                t.dropout2d(0.3)
            } else {
                t.dropout(0.3)
            };
            t.unwrap().to_vec().into_iter().map(f64::from).collect()
        };
        let kept = mask.iter().filter(|&&m| m != 0.0).count();
        assert!((250..420).contains(&kept) || channels, "{kept}");
        assert!(
            mask.iter()
                .all(|&m| m == 0.0 || m == f64::from(1.0f32 / 0.7f32))
        );
        check(
            "dropout",
            &x,
            |g, _| {
                if channels {
                    g.x(0).dropout2d(0.3)
                } else {
                    g.x(0).dropout(0.3)
                }
            },
            |v| v[0].iter().zip(&mask).map(|(x, m)| x * m).collect(),
        );
        let step = tape.inference(&params);
        let t = step
            .input(&x[0].values, &x[0].shape)
            .unwrap()
            .dropout(0.3)
            .unwrap();
        assert_eq!(t.data(), x[0].values);
    }
}

#[test]
fn a_samples_mask_depends_on_its_id_not_on_its_place() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let mut mask = |epoch, step, seed, samples: &[u64]| {
        let s = tape.step(
            &params,
            StepKey::new(epoch, step).seed(seed).samples(samples),
        );
        let t = s
            .input(&vec![1.0; samples.len() * 100], &[samples.len(), 100])
            .unwrap();
        let first = t.share().dropout(0.5).unwrap().to_vec();
        let second = t.dropout(0.5).unwrap().to_vec();
        assert_ne!(first, second, "two operations of a step share a mask");
        first
    };
    let both = mask(0, 0, 1, &[10, 20]);
    assert_eq!(mask(0, 0, 1, &[20, 7])[..100], both[100..]);
    assert_ne!(both[..100], both[100..]);
    assert_ne!(mask(1, 0, 1, &[10, 20]), both);
    assert_ne!(mask(0, 1, 1, &[10, 20]), both);
    assert_ne!(mask(0, 0, 2, &[10, 20]), both);
    assert_ne!(mask(0, 0, 1 << 40, &[10, 20]), mask(0, 0, 0, &[10, 20]));
    let s = tape.step(&params, StepKey::new(0, 0).samples(&[1]));
    let e = s
        .input(&[1.0; 4], &[2, 2])
        .unwrap()
        .dropout(0.5)
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Usage);
}

/// All blocks of a tensor, empty ones too: what dropout of the whole makes there, forward
/// and backward.
#[test]
fn a_block_is_dropped_as_in_the_whole_tensor() {
    let params = Scope::new(Seed(0)).build().unwrap();
    let mut sink = Recorder::like(&params);
    let mut tape = Tape::new(Threads(2));
    tape.poison(true);
    let mut dropped = |own: &[usize], block: Option<(&[usize], &[usize])>, channels, named| {
        let ids = &[7, 3, 9][..if named { 3 } else { 0 }];
        let step = tape.step(&params, StepKey::new(1, 2).seed(3).samples(ids));
        let ones = vec![1.0; own.iter().product()];
        let x = step.variable(&ones, own).unwrap();
        let y = match (block, channels) {
            (None, false) => x.share().dropout(0.5),
            (None, true) => x.share().dropout2d(0.5),
            (Some((full, start)), false) => x.share().dropout_block(0.5, full, start),
            (Some((full, start)), true) => x.share().dropout2d_block(0.5, full, start),
        };
        let y = y.unwrap();
        let out = y.to_vec();
        y.backward_with(&ones, &mut sink).unwrap();
        assert_eq!(x.grad().unwrap(), out);
        out
    };
    let ranges = |n: usize| (0..=n).flat_map(move |from| (from..=n).map(move |to| from..to));
    let full = [3, 2, 3, 5];
    for (channels, named) in [(false, false), (false, true), (true, true)] {
        let whole = dropped(&full, None, channels, named);
        assert!(whole.contains(&0.0) && whole.contains(&2.0));
        for a in ranges(full[0]) {
            for b in ranges(full[1]) {
                for c in ranges(full[2]) {
                    for d in ranges(full[3]) {
                        let block = [a.clone(), b.clone(), c.clone(), d.clone()];
                        let start = block.each_ref().map(|r| r.start);
                        let own = block.each_ref().map(|r| r.len());
                        let at = Some((&full[..], &start[..]));
                        let got = dropped(&own, at, channels, named);
                        let mut want = vec![];
                        for (i, &v) in whole.iter().enumerate() {
                            let (d, i) = (i % full[3], i / full[3]);
                            let (c, i) = (i % full[2], i / full[2]);
                            let index = [i / full[1], i % full[1], c, d];
                            if block.iter().zip(&index).all(|(r, i)| r.contains(i)) {
                                want.push(v);
                            }
                        }
                        assert_eq!(got, want, "{block:?} of {full:?}");
                    }
                }
            }
        }
    }
    // Longer than the kernel's pieces, from a place that is no multiple of anything.
    let whole = dropped(&[2, 9001], None, false, false);
    let block = dropped(&[2, 8990], Some((&[2, 9001], &[0, 7])), false, false);
    assert!(block[8990..] == whole[9001 + 7..][..8990]);

    let step = tape.step(&params, StepKey::new(0, 0));
    for (full, start) in [([2, 4], [0, 2]), ([2, 4], [usize::MAX, 0])] {
        let x = step.input(&[1.0; 6], &[2, 3]).unwrap();
        let e = x.dropout_block(0.5, &full, &start).unwrap_err();
        assert!(e.to_string().contains("does not lie in"), "{e}");
    }
    let x = step.input(&[1.0; 6], &[2, 3]).unwrap();
    assert!(x.dropout_block(0.5, &[6], &[0]).is_err());
}

#[test]
fn losses() {
    let x = [input(&[4, 5], 1)];
    let labels = [2, 0, 4, 4];
    check(
        "log-softmax",
        &x,
        |g, _| g.x(0).log_softmax(),
        |v| log_softmax(&v[0], 5),
    );
    check(
        "nll",
        &x,
        |g, _| g.x(0).nll_loss(&labels, 7.0),
        |v| nll(&v[0], 5, &labels, 7.0),
    );
    check(
        "cross-entropy",
        &x,
        |g, _| g.x(0).cross_entropy(&labels, 4.0),
        |v| nll(&log_softmax(&v[0], 5), 5, &labels, 4.0),
    );
    let t = noise(20, 8);
    for (reduction, divisor) in [
        (Reduction::Sum, 1.0),
        (Reduction::Mean, 20.0),
        (Reduction::Over(3.0), 3.0),
    ] {
        check(
            "mse",
            &x,
            |g, _| g.x(0).mse_loss(&t, reduction),
            |v| {
                vec![
                    v[0].iter()
                        .zip(&t)
                        .map(|(x, t)| (x - f64::from(*t)).powi(2))
                        .sum::<f64>()
                        / divisor,
                ]
            },
        );
    }
}

/// `a * b + a²`, element by element.
struct Product;

impl CustomOp for Product {
    fn forward(&self, inputs: &[&[f32]], output: &mut [f32]) -> phalanx_base::Result<()> {
        for (o, (a, b)) in output.iter_mut().zip(inputs[0].iter().zip(inputs[1])) {
            *o = a * b + a * a;
        }
        Ok(())
    }

    fn backward(
        &self,
        inputs: &[&[f32]],
        output: &[f32],
        d_output: &[f32],
        d_inputs: &mut [&mut [f32]],
    ) -> phalanx_base::Result<()> {
        for i in 0..output.len() {
            let (a, b) = (inputs[0][i], inputs[1][i]);
            d_inputs[0][i] = d_output[i] * (b + 2.0 * a);
            d_inputs[1][i] = d_output[i] * a;
        }
        Ok(())
    }
}

#[test]
fn custom_operations() {
    check(
        "custom",
        &[input(&[6], 1), input(&[6], 2)],
        |g, step| {
            let (a, b) = (g.x(0).scale(2.0)?, g.x(1));
            step.custom(Box::new(Product), vec![a, b], &[6])?.relu()
        },
        |v| {
            relu(
                v[0].iter()
                    .zip(&v[1])
                    .map(|(a, b)| 2.0 * a * b + 4.0 * a * a)
                    .collect(),
            )
        },
    );
}

#[test]
fn a_whole_network() {
    let c1 = Conv {
        n: 2,
        h: 8,
        w: 8,
        cin: 1,
        cout: 6,
        k: (3, 3),
        s: 1,
        p: 0,
        d: 1,
        g: 1,
    };
    let c2 = Conv {
        h: 6,
        w: 6,
        cin: 6,
        cout: 5,
        ..Conv {
            n: 2,
            h: 0,
            w: 0,
            cin: 0,
            cout: 0,
            k: (3, 3),
            s: 1,
            p: 0,
            d: 1,
            g: 1,
        }
    };
    let leaves = [
        input(&[2, 8, 8, 1], 1),
        param(&[6, 1, 3, 3], Layout::Conv, 2),
        param(&[6], Layout::Same, 3),
        param(&[5, 6, 3, 3], Layout::Conv, 4),
        param(&[5], Layout::Same, 5),
        param(&[4, 20], Layout::Same, 6),
        param(&[4], Layout::Same, 7),
    ];
    check(
        "network",
        &leaves,
        |g, _| {
            let x = g
                .x(0)
                .conv2d(g.p(1), Some(g.p(2)), 3.into(), Act::None)?
                .relu()?;
            let x = x.conv2d(g.p(3), Some(g.p(4)), 3.into(), Act::Relu)?;
            let x = x.max_pool2d(2)?.flatten()?;
            x.linear(g.p(5), Some(g.p(6)), Act::None)?
                .cross_entropy(&[1, 3], 2.0)
        },
        |v| {
            let x = relu(c1.run(&v[0], &v[1], Some(&v[2])));
            let x = relu(c2.run(&x, &v[3], Some(&v[4])));
            let x = flatten(&max_pool(&x, (2, 4, 4, 5), 2, 2, 0), (2, 4, 5));
            nll(
                &log_softmax(&linear(&x, &v[5], Some(&v[6]), 20, 4), 4),
                4,
                &[1, 3],
                2.0,
            )
        },
    );
}

#[test]
fn a_parameter_used_twice_is_ready_once_and_accumulation_adds() {
    let mut scope = Scope::new(Seed(0));
    let w = scope.param(
        "w",
        &[2, 2],
        Layout::Same,
        Init::Uniform {
            low: -1.0,
            high: 1.0,
        },
    );
    let params = scope.build().unwrap();
    let mut tape = Tape::new(Threads(1));
    let mut sink = Recorder::like(&params);
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.input(&[1.0, 2.0], &[1, 2]).unwrap();
    let y = x.matmul(w).unwrap().matmul(w).unwrap();
    y.mse_loss(&[0.0, 0.0], Reduction::Sum)
        .unwrap()
        .backward(&mut sink)
        .unwrap();
    assert_eq!(sink.order, [w]);
    drop(step);

    // Two accumulated micro-steps are twice one.
    let mut grads = phalanx_nn::Grads::like(&params);
    grads.set_accumulate(true);
    for _ in 0..2 {
        let step = tape.step(&params, StepKey::new(0, 0));
        let x = step.input(&[1.0, 2.0], &[1, 2]).unwrap();
        x.matmul(w)
            .unwrap()
            .mse_loss(&[0.5, 0.0], Reduction::Sum)
            .unwrap()
            .backward(&mut grads)
            .unwrap();
    }
    let twice = grads.grad(w).to_vec();
    grads.set_accumulate(false);
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = step.input(&[1.0, 2.0], &[1, 2]).unwrap();
    x.matmul(w)
        .unwrap()
        .mse_loss(&[0.5, 0.0], Reduction::Sum)
        .unwrap()
        .backward(&mut grads)
        .unwrap();
    for (t, o) in twice.iter().zip(grads.grad(w)) {
        assert_eq!(*t, 2.0 * o);
    }
}

#[test]
fn mistakes_are_named() {
    let mut scope = Scope::new(Seed(0));
    let w = scope.param("fc.weight", &[3, 4], Layout::Same, Init::Constant(0.0));
    let k = scope.param(
        "conv.weight",
        &[2, 3, 3, 3],
        Layout::Conv,
        Init::Constant(0.0),
    );
    let params = scope.build().unwrap();
    let mut other = Scope::new(Seed(0));
    for i in 0..5 {
        other.param(&format!("x{i}"), &[1], Layout::Same, Init::Constant(0.0));
    }
    let foreign = other.param("y", &[1, 1], Layout::Same, Init::Constant(0.0));
    let mut tape = Tape::new(Threads(1));
    let step = tape.step(&params, StepKey::new(0, 0));
    let x = || step.input(&[0.0; 10], &[2, 5]).unwrap();
    let image = || step.input(&[0.0; 12], &[1, 2, 2, 3]).unwrap();
    let says = |r: Result<Tensor<'_>>, part: &str| {
        let e = r.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Usage);
        assert!(e.to_string().contains(part), "{e}");
    };
    says(step.input(&[0.0; 3], &[2, 2]), "needs 4 values, got 3");
    says(step.input(&[], &[usize::MAX, 3]), "too large");
    says(step.input(&[], &[0; 7]), "more than 6");
    says(x().matmul(w), "fc.weight takes 3 inputs");
    says(x().matmul(k), "not a matrix");
    says(x().matmul(foreign), "another model");
    says(x().linear(w, Some(k), Act::None), "takes 4");
    says(x().conv2d(k, None, 3.into(), Act::None), "needs images");
    says(
        image().conv2d(k, None, 3.into(), Act::None),
        "does not fit images of 2 x 2",
    );
    says(
        image().conv2d(k, None, Conv2dOptions::new(3).groups(0), Act::None),
        "0 groups",
    );
    says(
        image().conv2d(
            k,
            None,
            Conv2dOptions::new(3).padding(1).stride(0),
            Act::None,
        ),
        "does not fit",
    );
    says(image().max_pool2d(3), "does not fit");
    says(image().max_pool2d(17), "256");
    says(image().max_pool2d(0), "does not fit");
    says(x().dropout(1.5), "1.5");
    says(x().nll_loss(&[1], 1.0), "1 labels for 2 rows");
    says(x().nll_loss(&[1, 5], 1.0), "label 5 of row 1");
    says(x().mse_loss(&[0.0], Reduction::Sum), "1 targets");
    says(x().add(image()), "differ");
    says(x().reshape(&[3, 3]), "cannot reshape");
    let mut sink = Recorder::like(&params);
    let e = x().backward(&mut sink).unwrap_err();
    assert!(e.to_string().contains("one element"));
    let e = x()
        .nll_loss(&[1, 1], 1.0)
        .unwrap()
        .backward(&mut sink)
        .unwrap_err();
    assert!(e.to_string().contains("depends on no parameter"));
    let v = step.variable(&[1.0], &[1]).unwrap();
    let again = v.share().scale(2.0).unwrap();
    v.scale(2.0).unwrap().backward(&mut sink).unwrap();
    let e = again.backward(&mut sink).unwrap_err();
    assert!(e.to_string().contains("already ran"));
    drop(step);
    let step = tape.inference(&params);
    let e = step
        .variable(&[1.0], &[1])
        .unwrap()
        .backward(&mut sink)
        .unwrap_err();
    assert!(e.to_string().contains("inference"));
}

/// Rows of `c` channels, normalised over all rows.
fn batch_norm(x: &[f64], c: usize, w: &[f64], b: &[f64], eps: f64) -> Vec<f64> {
    let rows = x.len() / c;
    let column = |k: usize| x.iter().skip(k).step_by(c);
    let constants: Vec<(f64, f64)> = (0..c)
        .map(|k| {
            let mean = column(k).sum::<f64>() / rows as f64;
            let var = column(k).map(|v| (v - mean).powi(2)).sum::<f64>() / rows as f64;
            (mean, 1.0 / (var + eps).sqrt())
        })
        .collect();
    x.iter()
        .enumerate()
        .map(|(i, v)| (v - constants[i % c].0) * constants[i % c].1 * w[i % c] + b[i % c])
        .collect()
}

#[test]
fn batch_normalisation() {
    // 70 channels: a whole block of lanes and a rest.
    for (c, rows) in [(3, 8), (70, 4)] {
        let leaves = [
            input(&[rows, c], 1),
            param(&[c], Layout::Same, 2),
            param(&[c], Layout::Same, 3),
            input(&[rows, c], 4),
        ];
        let options = |g: &Given<'_>| BatchNormOptions {
            weight: Some(g.p(1)),
            bias: Some(g.p(2)),
            running: None,
            momentum: None,
            eps: 1e-3,
        };
        let plain = |v: &[Vec<f64>]| batch_norm(&v[0], c, &v[1], &v[2], 1e-3);
        check(
            "batch norm",
            &leaves[..3],
            |g, _| g.x(0).batch_norm(&options(g), None, Act::None),
            plain,
        );
        check(
            "batch norm, relu",
            &leaves[..3],
            |g, _| g.x(0).batch_norm(&options(g), None, Act::Relu),
            |v| relu(plain(v)),
        );
        let sum = |v: &[Vec<f64>]| plain(v).iter().zip(&v[3]).map(|(a, b)| a + b).collect();
        check(
            "batch norm, residual",
            &leaves,
            |g, _| {
                let o = options(g);
                let (x, r) = (g.x(0), g.x(3));
                x.batch_norm(&o, Some(r), Act::None)
            },
            sum,
        );
        check(
            "batch norm, residual, relu",
            &leaves,
            |g, _| {
                let o = options(g);
                let (x, r) = (g.x(0), g.x(3));
                x.batch_norm(&o, Some(r), Act::Relu)
            },
            |v| relu(sum(v)),
        );
        // Weights of up to 1 reach 6 only with an offset.
        let lifted = |v: &[Vec<f64>]| -> Vec<f64> {
            let sum: Vec<f64> = sum(v);
            sum.iter().map(|s| s.clamp(0.0, 6.0)).collect()
        };
        let mut six = leaves.clone();
        for (i, v) in six[2].values.iter_mut().enumerate() {
            *v += [0.0, 6.0][i % 2];
        }
        check(
            "batch norm, residual, relu6",
            &six,
            |g, _| {
                let o = options(g);
                let (x, r) = (g.x(0), g.x(3));
                x.batch_norm(&o, Some(r), Act::Relu6)
            },
            lifted,
        );
        check(
            "batch norm, relu6",
            &six[..3],
            |g, _| g.x(0).batch_norm(&options(g), None, Act::Relu6),
            |v| plain(v).iter().map(|s| s.clamp(0.0, 6.0)).collect(),
        );
    }
}

#[test]
fn average_pooling() {
    let (n, h, w, c) = (2, 5, 6, 3);
    // Mean over the inputs of each window, divided by `count` or by how many there are.
    let pool = |x: &[f64], windows: &[(usize, usize, usize, usize)], count: Option<f64>| {
        let mut y = vec![];
        for i in 0..n {
            for &(y0, y1, x0, x1) in windows {
                for k in 0..c {
                    let mut sum = 0.0;
                    for yy in y0..y1 {
                        for xx in x0..x1 {
                            sum += x[((i * h + yy) * w + xx) * c + k];
                        }
                    }
                    y.push(sum / count.unwrap_or(((y1 - y0) * (x1 - x0)) as f64));
                }
            }
        }
        y
    };
    let x = [input(&[n, h, w, c], 1)];
    let mut fixed = vec![];
    for oy in 0..3usize {
        for ox in 0..3usize {
            let low = |o: usize| (2 * o).saturating_sub(1);
            fixed.push((low(oy), (2 * oy + 2).min(h), low(ox), (2 * ox + 2).min(w)));
        }
    }
    let options = AvgPool2dOptions::new(3).stride(2).padding(1);
    check(
        "average pooling, padding counted",
        &x,
        |g, _| g.x(0).avg_pool2d(options),
        |v| pool(&v[0], &fixed, Some(9.0)),
    );
    check(
        "average pooling, padding left out",
        &x,
        |g, _| g.x(0).avg_pool2d(options.exclude_padding()),
        |v| pool(&v[0], &fixed, None),
    );
    let rows = [(0, 2), (1, 4), (3, 5)];
    let columns = [(0, 2), (1, 3), (3, 5), (4, 6)];
    let adaptive: Vec<_> = rows
        .iter()
        .flat_map(|r| columns.iter().map(move |c| (r.0, r.1, c.0, c.1)))
        .collect();
    check(
        "adaptive average pooling",
        &x,
        |g, _| g.x(0).adaptive_avg_pool2d(3, 4),
        |v| pool(&v[0], &adaptive, None),
    );
    check(
        "global average pooling",
        &x,
        |g, _| g.x(0).global_avg_pool(),
        |v| pool(&v[0], &[(0, h, 0, w)], None),
    );
}

/// Operations whose weights are inputs of the step, in the engine's memory order.
#[test]
fn weights_that_are_tensors() {
    check(
        "linear_with",
        &[input(&[3, 5], 1), input(&[4, 5], 2), input(&[4], 3)],
        |g, _| {
            let (x, w, b) = (g.x(0), g.x(1), g.x(2));
            x.linear_with(w, Some(b.into()), Act::None)
        },
        |v| linear(&v[0], &v[1], Some(&v[2]), 5, 4),
    );
    let c = Conv {
        n: 2,
        h: 5,
        w: 4,
        cin: 2,
        cout: 3,
        k: (3, 2),
        s: 1,
        p: 1,
        d: 1,
        g: 1,
    };
    check(
        "conv2d_with",
        &[
            input(&[2, 5, 4, 2], 1),
            input(&[3, 2, 2, 3], 2),
            input(&[3], 3),
        ],
        |g, _| {
            let (x, w, b) = (g.x(0), g.x(1), g.x(2));
            let o = Conv2dOptions::rect(3, 2).padding(1);
            x.conv2d_with(w, Some(b.into()), o, Act::None)
        },
        |v| {
            // (kh, kw, in, out) to [out][in][kh][kw].
            let w = (0..36).map(|i| v[1][(i % 6 * 2 + i / 6 % 2) * 3 + i / 12]);
            c.run(&v[0], &w.collect::<Vec<_>>(), Some(&v[2]))
        },
    );
    check(
        "layer_norm_with",
        &[input(&[3, 4], 1), input(&[4], 2), input(&[4], 3)],
        |g, _| {
            let (x, w, b) = (g.x(0), g.x(1), g.x(2));
            x.layer_norm_with(&[4], (Some(w.into()), Some(b.into())), 1e-3)
        },
        |v| {
            let rows = v[0].chunks(4).flat_map(|row| {
                let mean = row.iter().sum::<f64>() / 4.0;
                let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 4.0;
                let at = |i: usize| (row[i] - mean) / (var + 1e-3).sqrt() * v[1][i] + v[2][i];
                (0..4).map(at).collect::<Vec<_>>()
            });
            rows.collect()
        },
    );
    check(
        "batch_norm_with",
        &[input(&[5, 3], 1), input(&[3], 2), input(&[3], 3)],
        |g, _| {
            let (x, w, b) = (g.x(0), g.x(1), g.x(2));
            let options = BatchNormOptions {
                weight: None,
                bias: None,
                running: None,
                momentum: None,
                eps: 1e-3,
            };
            x.batch_norm_with(&options, (Some(w.into()), Some(b.into())), None, Act::None)
        },
        |v| batch_norm(&v[0], 3, &v[1], &v[2], 1e-3),
    );
    check(
        "embedding",
        &[input(&[4, 3], 1)],
        |g, step| step.embedding(g.x(0), &[2, 0, 2], &[3], None),
        |v| {
            [2, 0, 2]
                .iter()
                .flat_map(|i| v[0][i * 3..][..3].to_vec())
                .collect()
        },
    );
}
