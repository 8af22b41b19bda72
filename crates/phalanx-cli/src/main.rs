//! The command `phalanx`.

fn main() -> std::process::ExitCode {
    phalanx_cli::main()
}
