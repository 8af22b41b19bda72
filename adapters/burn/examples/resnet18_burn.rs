//! `phalanx train resnet18` on a GPU, by Burn.
//!
//! ```text
//! cargo run --release -p phalanx-burn --features nn,wgpu --example resnet18_burn -- --nproc-per-node 2 --device wgpu
//! ```

mod engine;

use std::process::ExitCode;

fn main() -> ExitCode {
    let [_, program, ..] = phalanx_recipes::on_engine::<engine::OnBurn>();
    program.main()
}
