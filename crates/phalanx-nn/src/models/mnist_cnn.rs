//! The network of PyTorch's basic MNIST example.

use crate::layers::{Act, Conv2d, Dropout, Linear, MaxPool2d};
use crate::param::Scope;
use crate::{Result, Value};

/// conv 1→32 3x3, relu, conv 32→64 3x3, relu, max-pool 2, dropout, flatten,
/// linear 9216→128, relu, dropout, linear 128→10, log-softmax. 1.2 M parameters.
#[derive(Clone, Copy, Debug)]
pub struct MnistCnn {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    dropout1: Dropout,
    fc1: Linear,
    dropout2: Dropout,
    fc2: Linear,
}

impl MnistCnn {
    /// With PyTorch's dropout of 0.25 and 0.5.
    pub fn new(scope: &mut Scope) -> Self {
        Self::with_dropout(scope, 0.25, 0.5)
    }

    /// With other probabilities (0 switches one off).
    pub fn with_dropout(scope: &mut Scope, first: f64, second: f64) -> Self {
        MnistCnn {
            conv1: Conv2d::new(scope.enter("conv1"), 1, 32, 3),
            conv2: Conv2d::new(scope.enter("conv2"), 32, 64, 3),
            pool: MaxPool2d::new(2),
            dropout1: Dropout::new(first),
            fc1: Linear::new(scope.enter("fc1"), 9216, 128),
            dropout2: Dropout::new(second),
            fc2: Linear::new(scope.enter("fc2"), 128, 10),
        }
    }

    /// Images (N, 28, 28, 1) to log-probabilities (N, 10).
    ///
    /// # Errors
    /// `Usage` for other shapes.
    pub fn forward<'s, V: Value<'s>>(&self, x: V) -> Result<V> {
        let x = self.conv1.forward_act(x, Act::Relu)?;
        let x = self.conv2.forward_act(x, Act::Relu)?;
        let x = self.dropout1.forward(self.pool.forward(x)?)?;
        let x = self.fc1.forward_act(x.flatten()?, Act::Relu)?;
        self.fc2.forward(self.dropout2.forward(x)?)?.log_softmax()
    }
}
