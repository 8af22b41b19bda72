//! Many at once: who comes to take places, not to say anything.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use phalanx_wire::handshake::Role;
use socket2::Socket;

use super::handshake::hello_as;
use crate::line::{Answer, Line, Place};
use crate::scene::{LONG_PATIENCE, Scene, Tallies};

/// Slow connections per port.
const LORIS: usize = 100;
/// Unproven hellos held per port at a time.
const HALF: usize = 80;
/// Unproven hellos held at all ports together, with no pause in between.
const HALF_OPEN: usize = 1000;
/// How long a crowd is held.
const HOLD: Duration = Duration::from_secs(3);
/// Connections at a fresh port: more than a backlog takes.
const DOOR: usize = 300;

/// A connection that is not waited for.
fn start(place: &Place) -> Option<Socket> {
    let (socket, address) = place.socket()?;
    socket.set_nonblocking(true).ok()?;
    // In progress, done, or (Unix) no room: all the same to a crowd.
    let _ = socket.connect(&address);
    Some(socket)
}

/// One byte a second on many connections; whoever is closed comes again.
pub fn loris(scene: &Scene, tallies: &Tallies, _: usize) {
    let Some(hello) = hello_as(Role::Peer) else {
        return;
    };
    let mut lines: Vec<(Place, Line, usize)> = Vec::new();
    loop {
        for target in scene.targets() {
            let have = lines.iter().filter(|(p, ..)| *p == target.place).count();
            for _ in have..LORIS {
                match Line::open(&target.place, scene.source(), Duration::from_millis(50)) {
                    Some(line) => lines.push((target.place.clone(), line, 0)),
                    None => break,
                }
                if scene.is_over() {
                    return;
                }
            }
        }
        let before = lines.len();
        lines.retain_mut(|(_, line, said)| {
            let alive = *said < hello.len() && line.say(&hello[*said..=*said]);
            *said += 1;
            alive
        });
        tallies.note_many("slow-loris", Answer::Closed, (before - lines.len()) as u64);
        if !scene.sleep(Duration::from_secs(1)) {
            tallies.note_many("slow-loris", Answer::Silent, lines.len() as u64);
            return;
        }
    }
}

/// Sound hellos, whose challenge is not answered.
pub fn half_a_handshake(scene: &Scene, tallies: &Tallies, _: usize) {
    let Some(hello) = hello_as(Role::Peer) else {
        return;
    };
    loop {
        let mut held = Vec::new();
        for target in scene.targets() {
            for _ in 0..HALF {
                let line = Line::open(&target.place, scene.source(), Duration::from_millis(50));
                let Some(mut line) = line else { break };
                line.say(&hello);
                held.push(line);
            }
        }
        // Held longer than anybody's fair time, then left for the next wave.
        let going_on = scene.sleep(Duration::from_millis(700));
        tallies.note_many("half-a-handshake", Answer::Silent, held.len() as u64);
        if !going_on || !scene.sleep(Duration::from_millis(1500)) {
            return;
        }
    }
}

/// Sound hellos, whose challenge is not answered, from the address of the members;
/// whoever is closed comes again at once.
pub fn half_open(scene: &Scene, tallies: &Tallies, connections: usize) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    const NAME: &str = "half-open";
    const TURN: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    let Some(hello) = hello_as(Role::Peer) else {
        return;
    };
    // Whether it has said hello.
    let mut held: Vec<(Place, Socket, bool)> = Vec::new();
    while !scene.is_over() {
        let targets = scene.targets();
        let each = connections.min(HALF_OPEN) / targets.len().max(1);
        held.retain(|(place, ..)| targets.iter().any(|target| target.place == *place));
        for target in &targets {
            let have = held.iter().filter(|(at, ..)| *at == target.place).count();
            let more = (have..each).map_while(|_| start(&target.place));
            held.extend(more.map(|socket| (target.place.clone(), socket, false)));
        }
        let mut fds: Vec<PollFd<'_>> = held
            .iter()
            .map(|(_, socket, has_said)| match has_said {
                true => PollFd::new(socket, PollFlags::IN),
                false => PollFd::new(socket, PollFlags::OUT),
            })
            .collect();
        // Also the distance between two looks for new ports.
        let _ = poll(&mut fds, Some(&TURN));
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        held.retain_mut(|(_, socket, has_said)| {
            if !ready.next().unwrap_or(false) {
                return true;
            }
            let answer = if !*has_said {
                *has_said = true;
                match (&*socket).write_all(&hello) {
                    Ok(()) => return true,
                    Err(_) => Answer::Unreachable,
                }
            } else {
                match (&*socket).read(&mut [0; 512]) {
                    Ok(1..) => Answer::Challenged,
                    _ => Answer::Closed,
                }
            };
            let stays = answer == Answer::Challenged;
            tallies.note(NAME, answer);
            stays
        });
    }
}

/// So many connections at once, held, then reset.
pub fn crowd(scene: &Scene, tallies: &Tallies, connections: usize) {
    // Not in the first moment: that belongs to the door. But before a short job has ended.
    let mut pause = Duration::from_millis(1200);
    while scene.sleep(pause) {
        pause = Duration::from_millis(2500);
        let targets = scene.targets();
        if targets.is_empty() {
            continue;
        }
        let each = connections / targets.len();
        let mut held = Vec::with_capacity(connections);
        // The store may close a connection before anybody looks again.
        let mut came = Vec::with_capacity(connections);
        'open: for target in &targets {
            for i in 0..each {
                match start(&target.place) {
                    Some(socket) => {
                        came.push(socket.peer_addr().is_ok());
                        held.push(socket);
                    }
                    None => break 'open,
                }
                if i % 256 == 0 && scene.is_over() {
                    break 'open;
                }
            }
        }
        let since = Instant::now();
        while since.elapsed() < HOLD && scene.sleep(Duration::from_millis(200)) {
            for (came, socket) in came.iter_mut().zip(&held) {
                *came |= socket.peer_addr().is_ok();
            }
        }
        for socket in &held {
            let _ = socket.set_linger(Some(Duration::ZERO));
        }
        let established = came.iter().filter(|came| **came).count();
        tallies.note_many("crowd", Answer::Silent, established as u64);
        tallies.note_many(
            "crowd",
            Answer::Unreachable,
            (held.len() - established) as u64,
        );
    }
}

/// Connects and resets without a pause, for a second in three.
pub fn resets(scene: &Scene, tallies: &Tallies, _: usize) {
    while scene.sleep(Duration::from_secs(2)) {
        let start_of_burst = Instant::now();
        let mut count = 0;
        while start_of_burst.elapsed() < Duration::from_secs(1) && !scene.is_over() {
            for target in scene.targets() {
                if let Some(socket) = start(&target.place) {
                    let _ = socket.set_linger(Some(Duration::ZERO));
                    count += 1;
                }
            }
        }
        tallies.note_many("reset-flood", Answer::Closed, count);
    }
}

/// At each port that appears: a crowd that stays until it is thrown out.
pub fn door(scene: &Scene, tallies: &Tallies, _: usize) {
    let mut known = BTreeSet::new();
    let mut held: Vec<(Instant, Socket)> = Vec::new();
    while scene.sleep(Duration::from_millis(10)) {
        for target in scene.targets() {
            if known.insert(target.place.clone()) {
                let crowd = (0..DOOR).filter_map(|_| start(&target.place));
                held.extend(crowd.map(|socket| (Instant::now(), socket)));
            }
        }
        let before = held.len();
        held.retain(|(since, _)| since.elapsed() < LONG_PATIENCE);
        tallies.note_many("door", Answer::Silent, (before - held.len()) as u64);
    }
    tallies.note_many("door", Answer::Silent, held.len() as u64);
}
