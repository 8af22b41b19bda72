//! Fuzzes the environment, the init method and the address file.

use super::address_file::Address;
use super::launch::Launch;
use super::options::InitOptions;

/// The first line is the init method, the others are `NAME=value`.
pub(crate) fn environment(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut lines = text.lines();
    let options = InitOptions {
        init_method: lines.next().unwrap_or_default().to_owned(),
        ..InitOptions::default()
    };
    let variables: Vec<(&str, &str)> = lines.filter_map(|line| line.split_once('=')).collect();
    let launch = Launch::resolve(&options, |name| {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    });
    if let Ok(launch) = launch {
        assert!(launch.rank < launch.world);
        assert!(u32::try_from(launch.world).is_ok());
    }
    let _ = text.parse::<crate::Algorithm>();
    let _ = text.parse::<crate::Transport>();
}

pub(crate) fn environment_seeds() -> Vec<Vec<u8>> {
    [
        "env://\nRANK=1\nWORLD_SIZE=2\nMASTER_ADDR=127.0.0.1\nMASTER_PORT=29500\n",
        "tcp://[::1]:29500\nRANK=0\nWORLD_SIZE=4\nPHALANX_EPOCH=3\n",
        "tcp://node-a:1/\nRANK=0\nWORLD_SIZE=1\nPHALANX_TOKEN_FILE=/proc/self/fd/9\n",
        "file:///tmp/x\nRANK=3\nWORLD_SIZE=4\nTORCHELASTIC_RESTART_COUNT=2\nPHALANX_STORE=external\n",
        "env://\nRANK=3\nWORLD_SIZE=4\nPHALANX_STORE=node-a:29500\n",
        "env://\nRANK=3\nWORLD_SIZE=4\nMASTER_ADDR=a\nMASTER_PORT=65535\nTORCHELASTIC_USE_AGENT_STORE=True\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}

/// The address file.
pub(crate) fn address(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(address) = Address::parse(&text) {
        assert!(text.contains(&address.place));
    }
}

pub(crate) fn address_seeds() -> Vec<Vec<u8>> {
    let token = "5a".repeat(32);
    let seed = format!("phalanx-store 127.0.0.1:29500 {token} 6f-1/4026531840\n");
    vec![seed.into_bytes()]
}
