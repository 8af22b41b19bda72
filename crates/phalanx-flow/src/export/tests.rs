use std::path::PathBuf;
use std::process::Command;

use phalanx_base::error::ErrorKind;
use serde_json::json;

use super::text::{ONE_STORAGE, literal, quantity};
use super::*;
use crate::spec::parse_size;

/// Texts that quoting must carry.
const HOSTILE: [&str; 12] = [
    "",
    "a b",
    "it's",
    "\"q\" 'q' `id`",
    "$HOME ${HOME} $(id) $$",
    "\\ \\n \\' {x} {inputs.} {outputs.none",
    "line\nline\n\n",
    "-n",
    "*?[a]~#!&|;<>()",
    "\t\u{7}\u{1b}[31m\u{7f}",
    "ü \u{85}\u{2028}\u{feff} 😀",
    "''\"''\"''",
];

fn workflow(text: &str, folder: &Path) -> Workflow {
    Workflow::from_toml(text, folder, "flow.toml")
        .unwrap_or_else(|error| panic!("{}", error.chain()))
}

fn file<'a>(export: &'a Export, name: &str) -> &'a str {
    let found = export.files.iter().find(|(other, _)| other == name);
    &found
        .unwrap_or_else(|| panic!("no {name} in {:?}", export.files))
        .1
}

fn exported(text: &str, engine: Engine) -> Export {
    let workflow = workflow(text, Path::new("/w"));
    export(&workflow, &BTreeMap::new(), engine, &Volume::default()).unwrap()
}

/// Runs the script of one attempt; returns its exit code and messages.
fn run(script: &str, results: &Path) -> (Option<i32>, String) {
    let out = Command::new("sh")
        .args(["-c", script])
        .env("FLOW_RESULTS", results)
        .env("FLOW_FOLDER", "/the folder")
        .output()
        .unwrap();
    (
        out.status.code(),
        String::from_utf8_lossy(&out.stderr).into_owned(),
    )
}

#[test]
fn every_text_reaches_the_command_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let quoted = |text: &str| json!(text).to_string();
    // JSON's escapes are TOML's, but for this character.
    let toml = |text: &str| quoted(text).replace('\u{7f}', "\\u007f");
    for hostile in HOSTILE {
        let text = format!(
            "name = \"w\"\n[inputs]\nx = {0}\n[tasks.t]\n\
             command = [\"sh\", \"-c\", 'printf \"%s\\0\" \"$@\" \"$INPUT_X\" \"$V\" > \"$OUTPUT_ALL\"', \"sh\", {0}, \
             \"<{{inputs.x}}>{{inputs.n}}\", \"{{folder}}\"]\n\
             env.V = \"{{inputs.x}}.\"\ninputs = {{ x = \"{{inputs.x}}\", n = 7 }}\noutputs = {{ all = \"file\" }}\n",
            toml(hostile)
        );
        let export = exported(&text, Engine::Slurm);
        assert_eq!(
            run(file(&export, "tasks/t.sh"), dir.path()),
            (Some(0), String::new()),
            "{hostile:?}"
        );
        let got = std::fs::read(dir.path().join("t/all")).unwrap();
        let want = format!("{hostile}\0<{hostile}>7\0/the folder\0{hostile}\0{hostile}.\0");
        assert_eq!(String::from_utf8(got).unwrap(), want);
    }
}

/// JSON has all these escapes but that of characters beyond the first 65,536.
#[test]
fn literals_are_read_back() {
    for text in HOSTILE.map(|text| text.replace('😀', "")) {
        let quoted = literal(&text);
        assert_eq!(serde_json::from_str::<String>(&quoted).unwrap(), text);
        assert!(!quoted.contains(char::is_control), "{quoted:?}");
    }
    assert_eq!(literal("😀"), "\"\\U0001f600\"");
}

#[test]
fn amounts_are_exact() {
    for bytes in [0, 1, 1000, 1 << 10, 100 << 20, 30 << 30, (1 << 40) + 1] {
        assert_eq!(parse_size(&quantity(bytes)), Ok(bytes));
    }
    assert_eq!(quantity(100 << 20), "100Mi");
}

/// A value goes from a task to the next without the file's final newline, as in the engine.
#[test]
fn values_go_from_task_to_task() {
    let text = r#"
        name = "w"
        [tasks.a]
        shell = '''printf 'x\n\n\n' >"$OUTPUT_TEXT"; echo 3 >"$OUTPUT_N"; mkdir "$OUTPUT_D"; echo y >"$OUTPUT_D/f"'''
        outputs = { text = "string", n = "int", d = "folder" }
        [tasks.b]
        shell = '''printf '%s|' "$INPUT_TEXT" "$INPUT_N" "$(cat "$INPUT_D/f")" "$INPUT_RATE" >"$OUTPUT_ALL"'''
        inputs = { text = "{a.text}", n = "{a.n}", d = "{a.d}", rate = { type = "float", value = 1 } }
        outputs.all = "file"
    "#;
    let dir = tempfile::tempdir().unwrap();
    let export = exported(text, Engine::Slurm);
    for task in ["a", "b", "a", "b"] {
        let script = file(&export, &format!("tasks/{task}.sh"));
        assert_eq!(run(script, dir.path()), (Some(0), String::new()));
    }
    let all = std::fs::read_to_string(dir.path().join("b/all")).unwrap();
    assert_eq!(all, "x\n\n|3|y|1.0|");
    let mut left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["a", "b"], "attempts leave nothing else");
}

/// Each attempt has the secrets of its task, from the environment or a file, and no other.
#[test]
fn exports_name_secrets_and_scripts_get_their_values() {
    let text = r#"
        name = "w"
        [tasks.a]
        shell = '''printf '%s|' "$KEY_A" "${KEY_A_FILE-}" "${KEY_B-none}" "${KEY_B_FILE-none}" >"$OUTPUT_ALL"'''
        outputs.all = "file"
        secrets = ["KEY_A"]
        image = "i"
        [tasks.b]
        shell = 'echo "$KEY_B"'
        secrets = ["KEY_B"]
        image = "i"
    "#;
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("secret");
    std::fs::write(&secret, "from 'a' $file\n").unwrap();
    let secret = secret.to_str().unwrap();
    let slurm = exported(text, Engine::Slurm);
    for (variables, want) in [
        (
            &[("KEY_A", "a b"), ("KEY_B", "b")][..],
            Ok("a b||none|none|"),
        ),
        (
            &[("KEY_A_FILE", secret), ("KEY_B_FILE", secret)],
            Ok("from 'a' $file||none|none|"),
        ),
        (&[("KEY_B", "b")], Err("KEY_A must be set, a secret")),
    ] {
        let results = dir.path().join("results");
        let mut command = Command::new("sh");
        command.args(["-c", file(&slurm, "tasks/a.sh")]);
        command
            .env("FLOW_RESULTS", &results)
            .env("FLOW_FOLDER", "/");
        let out = command.envs(variables.iter().copied()).output().unwrap();
        let said = String::from_utf8(out.stderr).unwrap();
        match want {
            Ok(want) => {
                let got = std::fs::read_to_string(results.join("a/all")).expect(&said);
                assert_eq!((out.status.code(), &*got), (Some(0), want), "{said}");
                std::fs::remove_dir_all(results).unwrap();
            }
            Err(why) => assert!(!out.status.success() && said.contains(why), "{said}"),
        }
    }
    let kubernetes = exported(text, Engine::Kubernetes);
    let manifest = file(&kubernetes, "tasks/a.yaml");
    let key = ["secretKeyRef:", "key: \"KEY_A\"", "name: \"key-a\""];
    let lines: Vec<&str> = manifest.lines().map(str::trim).collect();
    assert!(lines.windows(3).any(|lines| lines == key), "{manifest}");
    assert!(!manifest.contains("KEY_B"), "{manifest}");
    let flyte = exported(text, Engine::Flyte);
    let module = file(&flyte, "flow_w.py");
    let requested = "secret_requests=[*_map(_secret, [\"KEY_A\"])]";
    assert_eq!(module.matches(requested).count(), 1, "{module}");
    assert_eq!(module.matches("[2], [\"KEY_B\"])").count(), 1, "{module}");
    for export in [slurm, kubernetes, flyte] {
        let has = |note: &String| note.contains("secrets") && note.ends_with("(a, b)");
        assert!(export.notes.iter().any(has), "{:?}", export.notes);
    }
}

#[test]
fn a_failed_attempt_has_the_commands_exit_code_and_no_results() {
    let dir = tempfile::tempdir().unwrap();
    for (command, code, said) in [
        (r#"["sh", "-c", "exit 7"]"#, 7, ""),
        // Not the shell's own commands.
        (r#"["exit", "0"]"#, 127, "exit"),
        (
            r#"["true"]"#,
            2,
            "task t: the command has not written the file o",
        ),
    ] {
        let text = format!("name = \"w\"\n[tasks.t]\ncommand = {command}\noutputs.o = \"file\"\n");
        let export = exported(&text, Engine::Slurm);
        let (got, stderr) = run(file(&export, "tasks/t.sh"), dir.path());
        assert_eq!(got, Some(code), "{command}: {stderr}");
        assert!(stderr.contains(said), "{stderr}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

const CHAIN: &str = r#"
    name = "my_flow-"
    [inputs]
    data = { type = "folder", default = "images" }
    [tasks.a]
    command = ["{folder}/get", "{inputs.data}"]
    inputs.data = "{inputs.data}"
    image = "i"
    retries = { times = 2, backoff = "90s" }
    timeout = "10m"
    unrecoverable = [9, 2, 9, -1]
    requests = { cpus = 2, memory = "1000000001", gpus = 1, storage = "1GiB" }
    limits = { memory = "2GiB" }
    cache = "1"
    outputs.n = "int"
    [tasks.A_]
    command = ["true"]
    after = ["a"]
    image = "i"
    [tasks.class]
    command = ["true"]
    after = ["a", "A_"]
    image = "i"
"#;

#[test]
fn slurm_gets_resources_times_and_order() {
    let export = exported(&CHAIN.replace("A_", "b"), Engine::Slurm);
    let batch = file(&export, "tasks/a.sbatch");
    // Three attempts of 10 minutes, pauses of 90 and 180 s, and a minute more.
    for line in [
        "--cpus-per-task=2",
        "--mem=2048M",
        "--gpus=1",
        "--tmp=1024M",
        "--time=36",
    ] {
        assert!(
            batch.contains(&format!("#SBATCH {line}\n")),
            "{line}\n{batch}"
        );
    }
    assert!(batch.contains("timeout -k 10 600 sh tasks/a.sh"), "{batch}");
    let submit = file(&export, "submit.sh");
    assert!(
        submit.contains("submit class \":$job_a:$job_b\""),
        "{submit}"
    );
    let said = export.notes.join("\n");
    for note in [
        "not cached (a)",
        "images are not used (a, b, class)",
        "gets the limit, not the smaller request (a)",
    ] {
        assert!(said.contains(note), "{said}");
    }
}

/// Jobs of a stand-in for sbatch, which knows two jobs and then no more.
#[test]
fn slurm_jobs_are_cancelled_if_one_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let program = |name: &str, text: &str| {
        std::fs::write(bin.join(name), format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(bin.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    program(
        "sbatch",
        "echo \"$@\" >>calls; n=$(wc -l <calls); [ \"$n\" -lt 3 ] && echo \"$n;cluster\"",
    );
    program("scancel", "echo cancel \"$@\" >>calls");
    let export = exported(&CHAIN.replace("A_", "b"), Engine::Slurm);
    export.write(&dir.path().join("out")).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let out = Command::new("sh")
        .args(["out/submit.sh", "--partition=x y"])
        .env("PATH", path)
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    let calls = std::fs::read_to_string(dir.path().join("out/calls")).unwrap();
    let want = "--parsable --partition=x y tasks/a.sbatch\n\
                --parsable --dependency=afterok:1 --kill-on-invalid-dep=yes --partition=x y tasks/b.sbatch\n\
                --parsable --dependency=afterok:1:2 --kill-on-invalid-dep=yes --partition=x y tasks/class.sbatch\n\
                cancel 1 2\n";
    assert_eq!(calls, want);
}

#[test]
fn kubernetes_gets_resources_times_and_names() {
    // Names that Kubernetes does not tell apart.
    let export = exported(
        &CHAIN.replace("tasks.class", "tasks.a__"),
        Engine::Kubernetes,
    );
    let job = file(&export, "tasks/a.yaml");
    for line in [
        "backoffLimit: 2\n",
        "activeDeadlineSeconds: 600\n",
        "nvidia.com/gpu: \"1\"\n",
        "memory: \"1000000001\"\n",
        "memory: \"2Gi\"\n",
        "ephemeral-storage: \"1Gi\"\n",
        "  values:\n            - 2\n            - 9\n",
    ] {
        assert!(job.contains(line), "{line}\n{job}");
    }
    let names = ["a", "A_", "a__"].map(|task| job_name(&export, task));
    let plain = names[0].clone();
    assert!(plain.starts_with("my-flow-a-"), "{plain}");
    let run = plain.trim_start_matches("my-flow-a-");
    assert_eq!(
        names,
        [plain.clone(), format!("{plain}-1"), format!("{plain}-2")]
    );
    for part in [
        format!("value: \"/flow/results/{run}\"\n"),
        format!("name: \"my-flow-scripts-{run}\"\n"),
    ] {
        assert!(job.contains(&part), "{part}\n{job}");
    }
    let said = export.notes.join("\n");
    for note in [
        "copy /w/images to /flow/inputs/w/images on the volume",
        "copy the folder /w to /flow/folder",
        "Kubernetes' own: 10 s",
        "only exit codes 1 to 255",
        "not cached",
    ] {
        assert!(said.contains(note), "{note}\n{said}");
    }
}

fn job_name(export: &Export, task: &str) -> String {
    let text = file(export, &format!("tasks/{task}.yaml"));
    let (_, metadata) = text.split_once("\nmetadata:\n").unwrap();
    let name = metadata
        .lines()
        .find_map(|line| line.trim().strip_prefix("name: "));
    name.unwrap().trim_matches('"').to_owned()
}

/// A complete Job is never that of other inputs, commands or files.
#[test]
fn kubernetes_jobs_of_other_inputs_have_other_names() {
    let dir = tempfile::tempdir().unwrap();
    let long = "a".repeat(64);
    let text = format!(
        r#"
        name = "{long}"
        [inputs]
        n = 1
        data = {{ type = "file", default = "data" }}
        [tasks.{long}]
        command = ["x", "{{inputs.n}}", "{{inputs.data}}"]
        inputs = {{ n = "{{inputs.n}}", data = "{{inputs.data}}" }}
        image = "i"
    "#
    );
    let named = |text: &str, n: i64| {
        let flow = workflow(text, dir.path());
        let inputs = BTreeMap::from([("n".to_owned(), json!(n))]);
        let volume = Volume {
            volume_size: Some(50 << 30),
            access_mode: Some("ReadWriteOnce".to_owned()),
            storage_class: Some("fast".to_owned()),
        };
        let export = export(&flow, &inputs, Engine::Kubernetes, &volume).unwrap();
        let claim = file(&export, "volume.yaml");
        for line in [
            "- \"ReadWriteOnce\"\n",
            "storage: \"50Gi\"\n",
            "storageClassName: \"fast\"\n",
        ] {
            assert!(claim.contains(line), "{claim}");
        }
        let is_unread = export
            .notes
            .iter()
            .any(|note| note.contains("cannot be read here"));
        assert_eq!(
            is_unread,
            !dir.path().join("data").exists(),
            "{:?}",
            export.notes
        );
        job_name(&export, &long)
    };
    let mut names = vec![named(&text, 1)];
    std::fs::write(dir.path().join("data"), "one").unwrap();
    names.push(named(&text, 1));
    assert_eq!(named(&text, 1), names[1], "the same again");
    names.push(named(&text, 2));
    names.push(named(&text.replace("\"x\"", "\"y\""), 2));
    names.push(named(&text.replace("image = \"i\"", "image = \"j\""), 2));
    std::fs::write(dir.path().join("data"), "two").unwrap();
    names.push(named(&text, 1));
    let different: std::collections::BTreeSet<&String> = names.iter().collect();
    assert_eq!(different.len(), names.len(), "{names:?}");
    assert!(names.iter().all(|name| name.len() <= 61), "{names:?}");
}

#[test]
fn volumes_are_of_kubernetes_only() {
    let flow = workflow(
        "name = \"w\"\n[tasks.t]\ncommand = [\"true\"]\n",
        Path::new("/w"),
    );
    let volume = Volume {
        volume_size: Some(1),
        ..Volume::default()
    };
    let error = export(&flow, &BTreeMap::new(), Engine::Slurm, &volume).unwrap_err();
    assert!(
        error.chain().contains("for --to kubernetes"),
        "{}",
        error.chain()
    );
}

#[test]
fn flyte_gets_names_of_python() {
    let export = exported(CHAIN, Engine::Flyte);
    let text = file(&export, "flow_my_flow_.py");
    for part in [
        "retries=2, timeout=_datetime.timedelta(seconds=600), cache=_flytekit.Cache(version=\"1\")",
        "_flytekit.Resources(cpu=\"2\", mem=\"1000000001\", gpu=\"1\", ephemeral_storage=\"1Gi\")",
        "def class_() -> _class__outputs:",
        "_of_class = class_()",
        "_of_A_ >> _of_class",
        "data: _Folder = _Folder(\"/w/images\")",
        "[_FLOW_FOLDER + \"/get\", _run.inputs[\"data\"]]",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(
        export
            .notes
            .iter()
            .any(|note| note.contains("class is called class_ there"))
    );
}

#[test]
fn a_group_of_inputs_is_a_dataclass_for_flyte() {
    let text = "name = \"w\"\n[inputs.g]\nn = 1\nseed = { type = \"int\" }\n[tasks.t]\ncommand = [\"x\", \"{inputs.h.n}\"]\n\
                inputs = { h = \"{inputs.g}\", one = \"{inputs.g.n}\" }\n";
    let module = exported(text, Engine::Flyte);
    let module = file(&module, "flow_w.py");
    for part in [
        "class _g_inputs:\n    seed: _int\n    n: _int = _dataclasses.field(default_factory=lambda: 1)\n",
        "def t(h: _g_inputs, one: _int) ->",
        "{\"h.n\": h.n, \"h.seed\": h.seed, \"one\": one}",
        "def w(g: _g_inputs) ->",
        "t(h=g, one=g.n)",
    ] {
        assert!(module.contains(part), "{part}\n{module}");
    }
}

#[test]
fn ephemeral_storage_is_that_of_the_host() {
    let text = CHAIN.replace(
        "storage = \"1GiB\"",
        "storage = \"20GiB\", ephemeral_storage = \"500MiB\"",
    );
    for (engine, name, want) in [
        (
            Engine::Flyte,
            "flow_my_flow_.py",
            "ephemeral_storage=\"500Mi\"",
        ),
        (
            Engine::Kubernetes,
            "tasks/a.yaml",
            "ephemeral-storage: \"500Mi\"\n",
        ),
        (Engine::Slurm, "tasks/a.sbatch", "--tmp=500M\n"),
    ] {
        let export = exported(&text, engine);
        let made = file(&export, name);
        assert!(
            made.contains(want) && !made.contains("20480M") && !made.contains("20Gi"),
            "{made}"
        );
        let said = export.notes.join("\n");
        assert!(said.contains(ONE_STORAGE), "{said}");
    }
}

#[test]
fn what_cannot_be_exported_is_an_error() {
    let error = |workflow: &Workflow, engine| {
        let error = export(workflow, &BTreeMap::new(), engine, &Volume::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        error.chain()
    };
    let text = "name = \"w\"\n[inputs]\nn = { type = \"int\" }\n[tasks.t]\ncommand = [\"true\"]\ninputs.n = \"{inputs.n}\"\n";
    let mut flow = workflow(text, Path::new("/w"));
    assert_eq!(error(&flow, Engine::Slurm), "input \"n\" has no value");
    let inputs = BTreeMap::from([("n".to_owned(), json!(1))]);
    let chain = export(&flow, &inputs, Engine::Kubernetes, &Volume::default())
        .unwrap_err()
        .chain();
    assert_eq!(chain, "task \"t\" has no container image");
    let module = export(&flow, &BTreeMap::new(), Engine::Flyte, &Volume::default()).unwrap();
    assert!(file(&module, "flow_w.py").contains("def w(n: _int) ->"));
    flow.tasks[0].action = Action::Function;
    assert!(error(&flow, Engine::Flyte).contains("function of a Rust program"));
    assert_eq!(flow.folder, PathBuf::from("/w"));
}
