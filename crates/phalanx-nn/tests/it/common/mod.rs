//! What several tests need.
pub mod differences;

use phalanx_nn::{GradSink, Grads, ParamId, Params};
use serde_json::Value;

/// A fixture tensor: row-major, PyTorch's layout.
#[derive(Clone, Debug)]
pub struct Array {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

impl Array {
    pub fn parse(v: &Value) -> Array {
        let shape = v["shape"]
            .as_array()
            .unwrap()
            .iter()
            .map(|d| d.as_u64().unwrap() as usize)
            .collect();
        let number = |v: &Value| match v.as_str() {
            // Decimals are the shortest that round-trip as f32.
            Some(s) => s.parse::<f32>().unwrap(),
            None => v.to_string().parse::<f32>().unwrap(),
        };
        Array {
            shape,
            data: v["data"].as_array().unwrap().iter().map(number).collect(),
        }
    }

    /// N, C, H, W to N, H, W, C; other ranks stay.
    pub fn channels_last(&self) -> Array {
        let &[n, c, h, w] = &*self.shape else {
            return self.clone();
        };
        let mut data = vec![0.0; self.data.len()];
        for i in 0..n {
            for k in 0..c {
                for p in 0..h * w {
                    data[(i * h * w + p) * c + k] = self.data[(i * c + k) * h * w + p];
                }
            }
        }
        Array {
            shape: vec![n, h, w, c],
            data,
        }
    }
}

/// N, H, W, C to N, C, H, W.
pub fn channels_first(data: &[f32], shape: &[usize]) -> Vec<f32> {
    let &[n, h, w, c] = shape else {
        return data.to_vec();
    };
    let mut out = vec![0.0; data.len()];
    for i in 0..n {
        for k in 0..c {
            for p in 0..h * w {
                out[(i * c + k) * h * w + p] = data[(i * h * w + p) * c + k];
            }
        }
    }
    out
}

/// The fixtures' formula tensors (parity/README.md).
pub fn hashed(len: usize, stream: u64, bits: u32, scale: f64) -> Vec<f32> {
    let half = f64::from(1u32 << (bits - 1));
    (0..len as u64)
        .map(|i| {
            let place = (i + 1).wrapping_add(stream.wrapping_mul(1_000_003));
            let k = (place.wrapping_mul(2_654_435_761) & 0xFFFF_FFFF) >> (32 - bits);
            ((k as f64 - half) / half * scale) as f32
        })
        .collect()
}

/// Numbers in (-1, 1), different for every stream.
pub fn noise(len: usize, stream: u64) -> Vec<f32> {
    hashed(len, stream, 16, 1.0)
}

/// A sink that notes in which order gradients became final and where each was written.
pub struct Recorder {
    pub grads: Grads,
    pub order: Vec<ParamId>,
    /// Those that were said to be finite.
    pub finite: Vec<ParamId>,
    pub written_at: Vec<Option<*const f32>>,
    pub accumulate: bool,
    /// Fails at this parameter.
    pub refuse: Option<ParamId>,
}

impl Recorder {
    pub fn like(params: &Params) -> Self {
        Recorder {
            grads: Grads::like(params),
            order: vec![],
            finite: vec![],
            written_at: vec![None; params.len()],
            accumulate: false,
            refuse: None,
        }
    }

    pub fn names<'p>(&self, params: &'p Params) -> Vec<&'p str> {
        self.order
            .iter()
            .map(|p| &*params.infos()[p.index()].name)
            .collect()
    }
}

impl GradSink for Recorder {
    fn slot(&mut self, param: ParamId) -> &mut [f32] {
        assert!(!self.order.contains(&param), "written after it was ready");
        let slot = self.grads.slot(param);
        self.written_at[param.index()] = Some(slot.as_ptr());
        slot
    }

    fn ready(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        assert!(!self.order.contains(&param), "ready twice");
        self.order.push(param);
        if self.refuse == Some(param) {
            Err(phalanx_base::Error::new(
                phalanx_base::ErrorKind::PeerLost,
                "no more",
            ))
        } else {
            Ok(())
        }
    }

    fn accumulates(&self) -> bool {
        self.accumulate
    }

    fn ready_finite(&mut self, param: ParamId) -> phalanx_base::Result<()> {
        self.finite.push(param);
        self.ready(param)
    }
}
