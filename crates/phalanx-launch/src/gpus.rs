//! The GPUs of this host, as the system lists them. No toolkit is needed.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

/// The names of the GPUs that this process may use: those of NVIDIA if there are some, else AMD's, else Intel's.
pub fn gpus() -> Vec<String> {
    gpus_in(Path::new("/"), |name| std::env::var(name).ok())
}

fn gpus_in(root: &Path, env: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let entries = |dir: &str| {
        let all = fs::read_dir(root.join(dir)).into_iter().flatten().flatten();
        let mut names: Vec<OsString> = all.map(|entry| entry.file_name()).collect();
        names.sort();
        names
    };
    let read = |file: String| fs::read_to_string(root.join(file)).unwrap_or_default();
    // A container may have the devices of some only, and shows the driver's list of all.
    let is_nvidia = |name: &OsString| {
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|rest| rest.parse::<u32>().is_ok())
    };
    let devices = entries("dev").into_iter().filter(is_nvidia).count();
    let mut nvidia: Vec<String> = (entries("proc/driver/nvidia/gpus").iter())
        .map(|name| {
            let file = format!("proc/driver/nvidia/gpus/{}/information", name.display());
            let text = read(file);
            let model = text.lines().find_map(|line| line.strip_prefix("Model:"));
            model.unwrap_or("NVIDIA GPU").trim().to_owned()
        })
        .collect();
    nvidia.resize(devices, "NVIDIA GPU".to_owned());
    let cards = entries("sys/class/drm");
    let cards = cards.iter().filter_map(|name| name.to_str());
    let vendors: Vec<String> = (cards.filter(|name| name.starts_with("renderD")))
        .map(|name| read(format!("sys/class/drm/{name}/device/vendor")))
        .collect();
    let of_vendor = |id: &str, name: &str| {
        let own = vendors.iter().filter(|vendor| vendor.trim() == id);
        vec![name.to_owned(); own.count()]
    };
    // Each with the variables that hide some of them from a process.
    let all: [(Vec<String>, &[&str]); 3] = [
        (nvidia, &["CUDA_VISIBLE_DEVICES"]),
        (
            of_vendor("0x1002", "AMD GPU"),
            &["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"],
        ),
        (of_vendor("0x8086", "Intel GPU"), &[]),
    ];
    let mut shown = all.into_iter().map(|(mut found, variables)| {
        for list in variables.iter().filter_map(|name| env(name)) {
            let hides_all = |one: &&str| matches!(one.trim(), "" | "-1" | "NoDevFiles");
            found.truncate(list.split(',').take_while(|one| !hides_all(one)).count());
        }
        found
    });
    shown.find(|found| !found.is_empty()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_those_of_the_system_that_are_not_hidden() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let found = |hidden: &[(&str, &str)]| {
            gpus_in(root.path(), |name| {
                let mut all = hidden.iter();
                all.find_map(|(key, value)| (*key == name).then(|| (*value).to_owned()))
            })
        };
        assert!(found(&[]).is_empty());
        write("sys/class/drm/renderD128/device/vendor", "0x8086\n");
        write("sys/class/drm/card0/device/vendor", "0x8086\n");
        assert_eq!(found(&[]), ["Intel GPU"]);
        write("sys/class/drm/renderD129/device/vendor", "0x1002\n");
        write("sys/class/drm/renderD130/device/vendor", "0x1002\n");
        assert_eq!(found(&[]), ["AMD GPU"; 2]);
        assert_eq!(found(&[("HIP_VISIBLE_DEVICES", "1")]), ["AMD GPU"]);
        for device in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"] {
            write(&format!("dev/{device}"), "");
        }
        assert_eq!(found(&[]), ["NVIDIA GPU"; 2]);
        for card in ["0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"] {
            let file = format!("proc/driver/nvidia/gpus/{card}/information");
            write(&file, "Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n");
        }
        assert_eq!(found(&[]), ["NVIDIA H200"; 2]);
        let hides = |shown| [("CUDA_VISIBLE_DEVICES", shown)];
        assert_eq!(found(&hides("1")), ["NVIDIA H200"]);
        assert_eq!(found(&hides("0,1,2")).len(), 2, "there are no more");
        // Where none of NVIDIA's may be used, those of another vendor count.
        assert_eq!(found(&hides("")), ["AMD GPU"; 2]);
        assert_eq!(found(&hides("-1")), ["AMD GPU"; 2]);
        assert_eq!(found(&hides("NoDevFiles")), ["AMD GPU"; 2], "Slurm's");
    }
}
