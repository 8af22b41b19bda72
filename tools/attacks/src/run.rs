//! Jobs, attackers, report.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use phalanx_base::lock;
use phalanx_garble::Dice;
use phalanx_store::{ErrorKind as StoreKind, Store};

use crate::Cli;
use crate::attack::{ALL, Attack, How, SELDOM, Shot, Who};
use crate::check::{MEMBERS_KIB, STRANGERS_KIB, compare, refusals};
use crate::job::{Job, Kind, Trace};
use crate::line::Place;
use crate::scene::{LONG_PATIENCE, Scene, Tallies, Target, record};

/// How often `/proc` is asked for new ports: a rank's is open for a second.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Threads that shoot at one port after the other.
const SHOOTERS: u64 = 2;
/// Shots of each kind at a port that has just appeared.
const VOLLEY: u64 = 2;
/// A member that joins while strangers crowd the door may take so long...
const JOIN_WITHIN: Duration = Duration::from_secs(5);
/// ...so often in a row.
const JOIN_ATTEMPTS: u32 = 4;
/// Between the end of a job's store and our hearing of it.
const ENDING: Duration = Duration::from_secs(3);

/// Slowest and number of what an honest member did meanwhile.
#[derive(Default)]
struct Honest {
    joins: AtomicU64,
    slowest_ms: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// All of it; whether every check passed.
pub fn run(cli: &Cli) -> Result<bool, String> {
    let phalanx = std::fs::canonicalize(&cli.phalanx).map_err(|e| {
        format!(
            "{}: {e}; build it (cargo build --release -p phalanx-cli) or name it with --phalanx",
            cli.phalanx.display()
        )
    })?;
    let connections = raise_open_files(cli.connections)?;
    let chosen: Vec<&Attack> = ALL
        .iter()
        .filter(|a| cli.only.is_empty() || cli.only.iter().any(|name| name == a.name))
        .collect();
    let (mad, strangers): (Vec<&Attack>, Vec<&Attack>) =
        chosen.into_iter().partition(|a| a.name == "mad-member");
    let work = tempfile::tempdir().map_err(|e| format!("no temporary folder: {e}"))?;

    let mut calm = Vec::new();
    for kind in Kind::ALL {
        let folder = work.path().join(format!("calm-{}", calm.len()));
        let trace = undisturbed(&phalanx, kind, cli.samples, &folder)?;
        println!(
            "undisturbed ({}): {} results, weights {}…, {:.1} s, largest process {} MiB",
            kind.name(),
            trace.results.len(),
            &trace.weights[..12.min(trace.weights.len())],
            trace.elapsed.as_secs_f64(),
            trace.peak_kib >> 10
        );
        calm.push(trace);
    }
    let tallies = Tallies::default();
    let honest = Honest::default();
    let mut wrong = Vec::new();
    if calm[0].weights != calm[1].weights {
        wrong.push("the transports disagree already undisturbed".to_owned());
    }
    let start = Instant::now();
    let limit = Duration::from_secs(cli.seconds);
    let mut round = 0;
    loop {
        let late = start.elapsed() >= limit;
        // At the end, a job for the member gone mad.
        let (attacks, more_kib) = match (late, mad.is_empty(), round, strangers.is_empty()) {
            (true, false, _, _) | (_, false, 0, true) => (&mad, MEMBERS_KIB),
            (true, true, ..) | (_, _, _, true) => break,
            _ => (&strangers, STRANGERS_KIB),
        };
        let last = std::ptr::eq(attacks, &mad);
        let which = if last { 0 } else { round % Kind::ALL.len() };
        let folder = work.path().join(format!("attacked-{round}"));
        let kind = Kind::ALL[which];
        let attacked = attacked(
            &phalanx,
            kind,
            cli.samples,
            &folder,
            attacks,
            connections,
            &tallies,
            &honest,
        );
        match attacked {
            Err(failure) => wrong.push(failure),
            Ok(trace) => {
                let slower = trace.elapsed.as_secs_f64() / calm[which].elapsed.as_secs_f64();
                println!(
                    "under attack ({}): {:.1} s ({slower:.2}x), largest process {} MiB, {} lines about strangers",
                    kind.name(),
                    trace.elapsed.as_secs_f64(),
                    trace.peak_kib >> 10,
                    refusals(&trace.said)
                );
                wrong.extend(compare(&calm[which], &trace, more_kib));
            }
        }
        round += 1;
        if last || !wrong.is_empty() {
            break;
        }
    }
    let tried = |a: &&Attack| {
        strangers
            .iter()
            .chain(&mad)
            .any(|chosen| chosen.name == a.name)
    };
    println!();
    for attack in ALL.iter().filter(tried) {
        report(attack, &tallies, &mut wrong);
    }
    Ok(conclude(round, &honest, wrong))
}

/// Prints what honest members found and what was `wrong` in `rounds` jobs; whether nothing was.
fn conclude(rounds: usize, honest: &Honest, mut wrong: Vec<String>) -> bool {
    let joins = honest.joins.load(Ordering::Relaxed);
    println!(
        "\na member joined the store {joins} times meanwhile; the slowest took {} ms",
        honest.slowest_ms.load(Ordering::Relaxed)
    );
    wrong.extend(lock(&honest.failure).clone());
    if wrong.is_empty() {
        println!("{rounds} jobs under attack: losses and weights bit-equal, no rank failed");
    }
    for what in &wrong {
        println!("WRONG: {what}");
    }
    wrong.is_empty()
}

/// One line: what, how many, what was answered; and what must not have been.
fn report(attack: &Attack, tallies: &Tallies, wrong: &mut Vec<String>) {
    let tally = tallies.of(attack.name);
    let answers: Vec<String> = tally
        .answers
        .iter()
        .map(|(answer, times)| format!("{answer} {times}"))
        .collect();
    println!(
        "{:<18} {:>7} x {}: {}",
        attack.name,
        tally.attempts,
        attack.what,
        answers.join(", ")
    );
    for answer in tally.answers.keys().filter(|a| !attack.who.may_hear(a)) {
        wrong.push(format!("{}: was answered \"{answer}\"", attack.name));
    }
    if SELDOM.contains(&attack.name) {
        return;
    }
    let unmet = match tally.attempts {
        0 => Some("no attempt was made".to_owned()),
        _ => attack.not_met(tally.answers.keys()),
    };
    if let Some(unmet) = unmet {
        wrong.push(format!(
            "{}: not met: {unmet}; give it more --seconds",
            attack.name
        ));
    }
}

fn undisturbed(phalanx: &Path, kind: Kind, samples: usize, folder: &Path) -> Result<Trace, String> {
    let mut job = Job::start(phalanx, kind, samples, folder)?;
    while !job.has_ended()? {
        job.look();
        std::thread::sleep(LOOK_EVERY);
    }
    job.finish()
}

/// One job from its first to its last moment under attack.
#[allow(
    clippy::too_many_arguments,
    reason = "one caller, which has them all by name"
)]
fn attacked(
    phalanx: &Path,
    kind: Kind,
    samples: usize,
    folder: &Path,
    attacks: &[&Attack],
    connections: usize,
    tallies: &Tallies,
    honest: &Honest,
) -> Result<Trace, String> {
    let mut job = Job::start(phalanx, kind, samples, folder)?;
    let scene = Scene::new(job.token.clone(), job.store);
    let watched = std::thread::scope(|scope| {
        let scene = &scene;
        for seed in 0..SHOOTERS {
            scope.spawn(move || shoot(scene, attacks, tallies, seed));
        }
        for attack in attacks {
            if let How::Siege(lay) = attack.how {
                scope.spawn(move || lay(scene, tallies, connections));
            }
        }
        scope.spawn(move || behave(scene, honest));
        let watch = |job: &mut Job| -> Result<(), String> {
            while !job.has_ended()? {
                let places = job.look();
                for place in scene.update(&job.family, places) {
                    scope.spawn(move || volley(scope, scene, attacks, tallies, place));
                }
                std::thread::sleep(LOOK_EVERY);
            }
            Ok(())
        };
        let watched = watch(&mut job);
        scene.end();
        watched
    });
    watched?;
    job.finish()
}

/// Does `attack` once at `target`, from the address `source`, if it is one of shots.
fn fire(
    scene: &Scene,
    (attack, tallies): (&Attack, &Tallies),
    (target, source): (&Target, u8),
    turn: u64,
    dice: &RefCell<Dice>,
) {
    let How::Shots(act) = attack.how else { return };
    let shot = Shot {
        target,
        recorded: lock(&scene.recorded).clone(),
        source,
        turn,
        dice,
    };
    if let Some(answer) = act(&shot) {
        tallies.note(attack.name, answer);
    }
}

/// Shoots at every port in turn, with every attack in turn, until the end.
fn shoot(scene: &Scene, attacks: &[&Attack], tallies: &Tallies, seed: u64) {
    let dice = RefCell::new(Dice(0x9e37_79b9 + seed));
    let mut turn = seed;
    while !scene.is_over() {
        let targets = scene.targets();
        if targets.is_empty() {
            std::thread::sleep(Duration::from_millis(2));
        }
        for attack in attacks {
            for target in &targets {
                if scene.is_over() {
                    return;
                }
                let at = (target, scene.source());
                fire(scene, (attack, tallies), at, turn, &dice);
            }
        }
        turn += SHOOTERS;
        // Sieges only: nothing to shoot.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Every attack at once at a port that has just appeared: those of ranks are
/// answered in the moment when the group forms, and then gone.
fn volley<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    scene: &'scope Scene,
    attacks: &'scope [&'scope Attack],
    tallies: &'scope Tallies,
    place: Place,
) {
    // A store gets those of mad members anyway, all the time.
    let shots = |attack: &&&Attack| matches!(attack.how, How::Shots(_)) && attack.who != Who::Mad;
    for attack in attacks.iter().filter(shots) {
        for turn in 0..VOLLEY {
            let target = scene.target(place.clone(), LONG_PATIENCE);
            let source = scene.source();
            scope.spawn(move || {
                let dice = RefCell::new(Dice(1 + turn));
                fire(scene, (attack, tallies), (&target, source), turn, &dice);
            });
        }
    }
}

/// An honest member: joins, sets, gets and leaves, again and again. Strangers
/// may cost it time, never success. Its first session is what gets replayed.
fn behave(scene: &Scene, honest: &Honest) {
    let mut count = 0_u64;
    let mut late = 0;
    while scene.sleep(Duration::from_millis(50)) {
        let Some(target) = scene.store() else {
            continue;
        };
        {
            let mut known = lock(&scene.recorded);
            if known.is_none() {
                *known = record(&target);
            }
        }
        let start = Instant::now();
        count += 1;
        let value = count.to_le_bytes();
        let result = scene.join(JOIN_WITHIN).and_then(|store| {
            store.set("attacks/honest", &value)?;
            store.get("attacks/honest", Duration::from_secs(5))
        });
        let took = start.elapsed().as_millis() as u64;
        match result {
            Ok(got) if got == value => {
                honest.joins.fetch_add(1, Ordering::Relaxed);
                honest.slowest_ms.fetch_max(took, Ordering::Relaxed);
                late = 0;
            }
            // Its job has ended meanwhile.
            _ if scene.is_over() || scene.store().is_none() => {}
            Err(e) if e.kind() == StoreKind::Timeout && late < JOIN_ATTEMPTS => {
                late += 1;
                let took = took.saturating_mul(u64::from(late));
                honest.slowest_ms.fetch_max(took, Ordering::Relaxed);
            }
            Err(e) if e.kind() == StoreKind::PeerLost && scene.ends_within(ENDING) => {}
            Ok(got) => fail(honest, format!("the store lost a member's value: {got:?}")),
            Err(e) => fail(honest, format!("an honest member could not join: {e}")),
        }
    }
}

fn fail(honest: &Honest, what: String) {
    lock(&honest.failure).get_or_insert(what);
}

/// Room for so many connections; fewer where the system allows no more.
fn raise_open_files(wanted: usize) -> Result<usize, String> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let most = now.maximum.unwrap_or(u64::MAX);
    let need = wanted as u64 + 2_000;
    let current = now.current.unwrap_or(u64::MAX);
    if current < need {
        let raised = Rlimit {
            current: Some(need.min(most)),
            maximum: now.maximum,
        };
        setrlimit(Resource::Nofile, raised)
            .map_err(|e| format!("raising the limit of open files: {e}"))?;
    }
    let room = current.max(need.min(most)).saturating_sub(2_000);
    let possible = wanted.min(usize::try_from(room).unwrap_or(usize::MAX));
    if possible < wanted {
        println!("note: only {possible} connections at once: the limit of open files is {most}");
    }
    Ok(possible)
}
