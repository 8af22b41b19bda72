//! Progress without a terminal.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_data::progress::Progress;

#[derive(Clone, Default)]
struct Paper(Arc<Mutex<Vec<u8>>>);

impl Paper {
    fn lines(&self) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

impl Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_line_appears_when_it_is_due_and_at_the_end() {
    let paper = Paper::default();
    let mut progress = Progress::lines(Box::new(paper.clone()), Duration::ZERO);
    progress.begin(1, 3, 4);
    for _ in 0..4 {
        progress.step(128, Some(0.5));
    }
    progress.end();
    let lines = paper.lines();
    assert_eq!(lines.len(), 5);
    assert!(
        lines[0].starts_with("epoch 1/3   25 %  1/4  "),
        "{}",
        lines[0]
    );
    assert!(
        lines[0].contains(" images/s  loss 0.5000  "),
        "{}",
        lines[0]
    );
    assert!(lines[4].starts_with("epoch 1/3 took 0.0"), "{}", lines[4]);
    assert!(lines[4].contains("  4 steps  "), "{}", lines[4]);
}

#[test]
fn between_two_due_times_nothing_is_written() {
    let paper = Paper::default();
    let mut progress = Progress::lines(Box::new(paper.clone()), Duration::from_secs(3600));
    progress.begin(1, 1, 1000);
    for _ in 0..1000 {
        progress.step(1, None);
    }
    assert!(paper.lines().is_empty());
    progress.note("saved");
    assert_eq!(paper.lines(), ["saved"]);
    progress.end();
    assert_eq!(paper.lines().len(), 2);
    progress.end();
    assert_eq!(paper.lines().len(), 2);
}

#[test]
fn an_abandoned_epoch_leaves_no_line() {
    let paper = Paper::default();
    let mut progress = Progress::lines(Box::new(paper.clone()), Duration::from_secs(3600));
    progress.begin(1, 1, 10);
    progress.step(1, None);
    progress.abandon();
    progress.step(1, None);
    drop(progress);
    assert!(paper.lines().is_empty());
}

#[test]
fn other_ranks_are_silent_and_calls_outside_an_epoch_harmless() {
    for mut progress in [Progress::for_rank(3), Progress::silent()] {
        progress.step(1, Some(1.0));
        progress.begin(1, 1, 1);
        progress.step(1, Some(1.0));
        progress.note("must not be seen");
        progress.end();
        assert_eq!(progress.suspend(|| 7), 7);
    }
}

#[test]
fn a_closed_stream_does_not_stop_training() {
    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut progress = Progress::lines(Box::new(Closed), Duration::ZERO);
    progress.begin(1, 1, 1);
    progress.step(1, None);
    progress.end();
}

#[test]
fn a_measure_is_shown_from_its_evaluation_on_and_the_speed_is_without_it() {
    let paper = Paper::default();
    let mut progress = Progress::lines(Box::new(paper.clone()), Duration::ZERO);
    progress.begin(1, 2, 2);
    progress.step(128, Some(0.5));
    let began = std::time::Instant::now();
    std::thread::sleep(Duration::from_millis(400));
    progress.leave_out(began.elapsed());
    progress.set_measure("auc 0.7980".to_owned());
    progress.step(128, Some(0.4));
    progress.end();
    progress.begin(2, 2, 1);
    progress.step(128, Some(0.3));
    let lines = paper.lines();
    assert!(!lines[0].contains("auc"), "{}", lines[0]);
    for (line, loss) in [(1, "0.4000"), (3, "0.3000")] {
        let shown = format!("  loss {loss}  auc 0.7980  0:00 left");
        assert!(lines[line].ends_with(&shown), "{}", lines[line]);
    }
    let (_, speed) = lines[2].split_once("2 steps  ").expect("a speed");
    let (speed, _) = speed.split_once(" images/s").expect("a unit");
    let speed: f64 = speed.replace(',', "").parse().expect("a number");
    // With it, 640 at most.
    assert!(speed > 700.0, "{}", lines[2]);
    // Outside an epoch nothing is left out.
    progress.end();
    progress.leave_out(Duration::from_secs(3600));
}
