//! The program that ranks run: its command, and whether it can be started.

use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use phalanx_base::files::{as_typed, open_regular};

use super::place::{Env, text};
use crate::error::{Error, Result, refuse};

/// How PROGRAM is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interpretation {
    /// `--module`: PROGRAM is a Python module.
    pub module: bool,
    /// `--no-python`, or `--` before PROGRAM: as it is.
    pub no_python: bool,
    /// `--run-path`: PROGRAM is a Python script, whatever its name.
    pub run_path: bool,
}

/// A program with its arguments, and the Python script among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// What to start.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// The script that an interpreter reads.
    pub script: Option<OsString>,
}

impl Program {
    /// The name of its file, or of the script's; `phalanx train mnist` of our command.
    pub(crate) fn name(&self) -> String {
        let file = self.script.as_ref().unwrap_or(&self.program);
        let name = Path::new(file).file_name().unwrap_or(file);
        let is_word =
            |word: &&OsString| name == "phalanx" && !word.as_encoded_bytes().starts_with(b"-");
        let words = self.args.iter().take_while(is_word);
        let words = std::iter::once(name.display()).chain(words.map(|word| word.display()));
        words
            .map(|word| word.to_string())
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Checks that it can be started, so that a typing error gives one message and not one from every rank.
    ///
    /// # Errors
    /// `Usage` for a program or script that is not there.
    pub fn check(&self, env: &Env) -> Result<()> {
        let found = find_program(&self.program, env.get("PATH").map(String::as_str));
        found.map_err(|error| match self.args.first() {
            Some(first) if first == "-u" => {
                error.note("set", "PYTHON_EXEC to a Python interpreter")
            }
            _ => error,
        })?;
        let Some(script) = &self.script else {
            return Ok(());
        };
        let about = std::fs::metadata(script);
        about.map(drop).map_err(|error| {
            Error::usage(format!("cannot read {}", script.display())).caused_by(error)
        })
    }
}

impl Interpretation {
    /// The command for PROGRAM, the first of `words`, and its arguments.
    ///
    /// # Errors
    /// Usage, for flags that contradict each other and without a program.
    pub fn command(self, words: &[OsString], env: &Env) -> Result<Program> {
        let Some((first, rest)) = words.split_first() else {
            refuse!("no program to launch");
        };
        if self.module && self.no_python && !self.run_path {
            refuse!("--module and --no-python contradict each other; give one of them");
        }
        let is_script = self.run_path
            || !self.module && !self.no_python && first.as_encoded_bytes().ends_with(b".py");
        if !is_script && !self.module {
            return Ok(Program {
                program: first.clone(),
                args: rest.to_vec(),
                script: None,
            });
        }
        let python = text(env, "PYTHON_EXEC");
        let options: &[&str] = if is_script { &["-u"] } else { &["-u", "-m"] };
        Ok(Program {
            program: python.unwrap_or("python3").into(),
            args: options
                .iter()
                .map(OsString::from)
                .chain(words.iter().cloned())
                .collect(),
            script: is_script.then(|| first.clone()),
        })
    }
}

/// Checks that the program of this name can be started.
fn find_program(program: &OsStr, path: Option<&str>) -> Result<()> {
    let shown = program.display();
    if program.is_empty() {
        refuse!("the program's name is empty");
    }
    if program.as_encoded_bytes().contains(&b'/') {
        let file = Path::new(program);
        return match std::fs::metadata(file) {
            Err(error) => Err(Error::usage(format!("cannot start {shown}")).caused_by(error)),
            Ok(about) if about.is_dir() => {
                Err(Error::usage(format!("{shown} is a folder, not a program")))
            }
            Ok(_) if executable(file) => match has_dos_interpreter(file) {
                true => Err(Error::usage(format!(
                    "cannot start {shown}: its first line names an interpreter and ends in CR LF, as on Windows"
                ))
                .note("fix", format!("sed -i 's/\\r$//' {}", as_typed(file)))),
                false => Ok(()),
            },
            Ok(_) => Err(interpreter_hint(
                Error::usage(format!("{shown} is not an executable file")),
                program,
                true,
            )),
        };
    }
    if in_path(program, path).is_some() {
        return Ok(());
    }
    let error = Error::usage(format!("no program \"{shown}\" in PATH"));
    Err(if ["train", "bench"].iter().any(|ours| program == *ours) {
        error
            .note(
                "try",
                format!("phalanx {shown} ..., which starts its own ranks"),
            )
            .note("or", format!("phalanx launch ... phalanx {shown} ..."))
    } else if Path::new(program).is_file() {
        interpreter_hint(error, program, executable(Path::new(program)))
    } else {
        error
    })
}

/// The file of a program that is given by its name alone.
pub fn in_path(program: &OsStr, path: Option<&str>) -> Option<PathBuf> {
    // What execvp takes where PATH is unset.
    path.unwrap_or("/bin:/usr/bin")
        .split(':')
        .map(|dir| PathBuf::from(if dir.is_empty() { "." } else { dir }).join(program))
        .find(|file| executable(file))
}

/// Whether the system would look for an interpreter whose name ends in a carriage return.
fn has_dos_interpreter(file: &Path) -> bool {
    let mut first = Vec::new();
    let read = open_regular(file).map(|file| file.take(256).read_to_end(&mut first));
    let line = first.split(|byte| *byte == b'\n').next();
    read.is_ok() && line.is_some_and(|line| line.starts_with(b"#!") && line.ends_with(b"\r"))
}

fn executable(file: &Path) -> bool {
    std::fs::metadata(file)
        .is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
}

/// torchrun takes a script; we take a program.
fn interpreter_hint(error: Error, program: &OsStr, here: bool) -> Error {
    let shown = as_typed(program.as_ref());
    let python = Path::new(program).extension().is_some_and(|e| e == "py");
    if python {
        // It was typed after `--` or --no-python.
        error.note(
            "try",
            format!("phalanx launch ... {shown}   (Python runs it then)"),
        )
    } else if here && !program.as_encoded_bytes().contains(&b'/') {
        let here = as_typed(&Path::new(".").join(program));
        error.note("try", format!("phalanx launch ... {here}"))
    } else {
        error.note("fix", format!("chmod +x {shown}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::tests::env_of as env;

    #[test]
    fn python_runs_scripts_and_modules() {
        let with = |flag: &str| Interpretation {
            module: flag.contains("-m"),
            no_python: flag.contains("--no-python"),
            run_path: flag.contains("--run-path"),
        };
        for (flags, words, want) in [
            ("", "train.py --x 1", "python3 -u train.py --x 1"),
            ("", "dir/train.py", "python3 -u dir/train.py"),
            ("", "./prog a.py", "./prog a.py"),
            ("", "python3 train.py", "python3 train.py"),
            ("--no-python", "train.py --x", "train.py --x"),
            ("-m", "pkg.train --x", "python3 -u -m pkg.train --x"),
            ("-m", "odd.py", "python3 -u -m odd.py"),
            ("--run-path", "script", "python3 -u script"),
            ("--run-path --no-python", "script", "python3 -u script"),
        ] {
            let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
            let got = with(flags).command(&words, &env(&[])).unwrap();
            let line: Vec<&str> = std::iter::once(&got.program)
                .chain(&got.args)
                .map(|word| word.to_str().unwrap())
                .collect();
            assert_eq!(line.join(" "), want, "{flags}");
            assert_eq!(
                got.script.is_some(),
                want.starts_with("python3 -u ") && flags != "-m"
            );
        }
        let words = ["a.py".into()];
        let python = env(&[("PYTHON_EXEC", "/opt/python")]);
        let got = with("").command(&words, &python).unwrap();
        assert_eq!(got.program, "/opt/python");
        let error = with("-m --no-python").command(&words, &python).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(with("").command(&[], &python).is_err());
    }

    #[test]
    fn programs_are_found_or_named() {
        assert!(find_program("sh".as_ref(), Some("/nowhere:/bin")).is_ok());
        assert!(find_program("sh".as_ref(), None).is_ok());
        assert!(find_program("/bin/sh".as_ref(), None).is_ok());
        for (program, want) in [
            ("", "empty"),
            ("no-such-program", "no program \"no-such-program\" in PATH"),
            ("/no/such", "cannot start /no/such: "),
            ("/etc/passwd", "/etc/passwd is not an executable file"),
            ("/bin", "/bin is a folder, not a program"),
            ("train", "no program \"train\" in PATH"),
        ] {
            let error = find_program(program.as_ref(), Some("/bin")).unwrap_err();
            assert!(error.chain().contains(want), "{}", error.chain());
            assert_eq!(error.exit_code(), 2);
        }
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("train.py");
        std::fs::write(&script, "").unwrap();
        let error = find_program(script.as_os_str(), None).unwrap_err();
        assert!(
            error.render().contains("Python runs it"),
            "{}",
            error.render()
        );
        let script = dir.path().join("dos.sh");
        std::fs::write(&script, "#!/bin/sh\r\necho\r\n").unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o700)).unwrap();
        let error = find_program(script.as_os_str(), None).unwrap_err();
        assert!(
            error.render().contains("sed -i 's/\\r$//' "),
            "{}",
            error.render()
        );
        std::fs::write(&script, "#!/bin/sh\necho\r\n").unwrap();
        assert!(find_program(script.as_os_str(), None).is_ok());
        let error = find_program("train".as_ref(), Some("/bin")).unwrap_err();
        assert!(
            error.render().contains("try     phalanx train"),
            "{}",
            error.render()
        );
    }

    /// What its user types after it may be different on each node.
    #[test]
    fn a_program_has_the_name_of_its_file_and_our_command_those_of_its_subcommands() {
        for (line, want) in [
            ("/opt/phalanx train mnist --lr 1", "phalanx train mnist"),
            ("/opt/own data/of/this/node --lr 1", "own"),
            ("python3 train.py", "python3"),
        ] {
            let mut words = line.split(' ').map(OsString::from);
            let program = Program {
                program: words.next().unwrap_or_default(),
                args: words.collect(),
                script: None,
            };
            assert_eq!(program.name(), want);
            let script = Some("dir/train.py".into());
            assert_eq!(Program { script, ..program }.name(), "train.py");
        }
    }
}
