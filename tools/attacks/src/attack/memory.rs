//! The Unix socket by which the ranks of a host share memory. It listens for a few
//! milliseconds while the group forms, so this looks for it without a pause.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use phalanx_wire::handshake::Role;

use super::handshake::hello_as;
use crate::line::{Line, Place};
use crate::proc;
use crate::scene::{PATIENCE, Scene, Tallies};

/// How such sockets are called.
const NAMED: &str = "phalanx-";
/// Descriptors that come with one message: nearly as many as the kernel takes.
const DESCRIPTORS: usize = 200;
/// Connections at one socket.
const CONNECTIONS: usize = 12;
/// Between two looks.
const PAUSE: Duration = Duration::from_micros(200);

/// Hellos of another job and plain noise, each with descriptors that nobody
/// asked for, which must neither be kept nor keep the members out.
pub fn door(scene: &Scene, tallies: &Tallies, _: usize) {
    let (Some(hello), Ok(file)) = (hello_as(Role::SharedMemory), File::open("/dev/null")) else {
        return;
    };
    let descriptors = vec![file.as_fd(); DESCRIPTORS];
    let mut known = BTreeSet::new();
    while !scene.is_over() {
        for (name, inode) in proc::abstract_listeners() {
            let is_new = name.starts_with(NAMED) && known.insert(name.clone());
            // Other jobs of this machine are left in peace.
            if !is_new || !proc::holds(&scene.family(), inode) {
                continue;
            }
            let place = Place::Unix(name);
            let mut lines: Vec<Line> = (0..CONNECTIONS)
                .filter_map(|_| Line::open(&place, 0, PATIENCE))
                .collect();
            for (turn, line) in lines.iter_mut().enumerate() {
                let bytes = if turn % 2 == 0 {
                    &hello[..]
                } else {
                    &[0x5a; 100]
                };
                line.say_with(bytes, &descriptors);
            }
            for mut line in lines {
                tallies.note("memory-door", line.judge());
            }
        }
        std::thread::sleep(PAUSE);
    }
}
