//! The operations of a forward pass, for pictures of a model.

use super::Step;
use super::node::Visit;

/// An operation that a training step has recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphNode {
    /// Name of the operation, e.g. `Conv2d`.
    pub operation: &'static str,
    /// The parameters it uses, by name.
    pub params: Vec<String>,
    /// Its inputs: places in the list of nodes; `None` for values from outside, such as the batch.
    pub inputs: Vec<Option<usize>>,
    /// Shape of its output.
    pub shape: Vec<usize>,
}

impl Step<'_> {
    /// The operations recorded so far, in the order in which they ran. Empty in an evaluation and after
    /// backward.
    pub fn graph(&self) -> Vec<GraphNode> {
        let state = self.state();
        let mut makers = vec![None; state.slots.len()];
        let mut graph = Vec::with_capacity(state.nodes.len());
        for (index, node) in state.nodes.iter().enumerate() {
            let mut made = GraphNode {
                operation: node.name(),
                params: Vec::new(),
                inputs: Vec::new(),
                shape: Vec::new(),
            };
            node.visit(&mut |visit| match visit {
                Visit::Output(slot) => {
                    makers[slot.index()] = Some(index);
                    made.shape = state.slots[slot.index()].shape.to_vec();
                }
                Visit::Input(slot) | Visit::Once(slot) => made.inputs.push(makers[slot.index()]),
                Visit::Param(param) => {
                    let info = self.params.infos().get(param.index());
                    made.params.extend(info.map(|info| info.name.clone()));
                }
                Visit::Saved(_) => {}
            });
            graph.push(made);
        }
        graph
    }
}
