//! Steps of Muon, of a matrix.

simd! {
    /// Momentum and the update before it is made orthogonal.
    pub fn averages(x: &mut [f32], buf: &mut [f32], g: &[f32], factor: f32, settings: (f32, bool)) {
        let (momentum, nesterov) = settings;
        for ((x, buf), &g) in x.iter_mut().zip(buf).zip(g) {
            let g = g * factor;
            *buf = (1.0 - momentum).mul_add(g - *buf, *buf);
            *x = if nesterov { momentum.mul_add(*buf - g, g) } else { *buf };
        }
    }
}

simd! {
    /// `square = c square + b gram`.
    pub fn combine(square: &mut [f32], gram: &[f32], factors: (f32, f32)) {
        let (c, b) = factors;
        for (square, gram) in square.iter_mut().zip(gram) {
            *square = c.mul_add(*square, b * gram);
        }
    }
}

simd! {
    /// Shrinks the weights, and adds updates multiplied by the negative learning rate.
    pub fn step(p: &mut [f32], x: &[f32], shrink: f32, neg_lr: f32) {
        for (p, &x) in p.iter_mut().zip(x) {
            *p = x.mul_add(neg_lr, *p * shrink);
        }
    }
}
