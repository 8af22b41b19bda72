//! A run as one HTML page: its graph, its attempts over time, and each task with settings, outputs
//! and the end of its log.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use phalanx_base::format;

use crate::child::{last_lines, outputs_dir};
use crate::resources::size;
use crate::spec::{Resources, Task, Workflow};
use crate::store::{Attempt, Item, Items, Node, Run, State, Store, now, objects_in};

const STYLE: &str = "\
:root{color-scheme:light dark;--text:#1d2330;--muted:#5b6575;--page:#fff;--box:#f2f4f7;--line:#98a2b3;--link:#1f5fd1;\
--done:#12805c;--running:#1f6feb;--failed:#c6352b;--waiting:#667085;--skipped:#98a2b3;--cached:#7a5af8}\
@media(prefers-color-scheme:dark){:root{--text:#e6e9ef;--muted:#98a2b3;--page:#14171d;--box:#20252e;--line:#5d6677;--link:#8ab4ff;\
--done:#3ecf8e;--running:#6ea8fe;--failed:#ff7b72;--waiting:#98a2b3;--skipped:#5d6677;--cached:#b4a2ff}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);max-width:70rem;margin:2rem auto;padding:0 1rem;overflow-wrap:break-word}\
h1{font-size:1.6rem;margin:0}h2{font-size:1.2rem;margin:2rem 0 .6rem}h3{font-size:1rem;margin:0}a{color:var(--link)}.muted{color:var(--muted)}\
.wide{overflow-x:auto}svg text{fill:var(--text);font:14px system-ui,sans-serif}svg .small{fill:var(--muted);font-size:12px}\
rect{fill:var(--box);stroke:var(--state);stroke-width:2}path{fill:none;stroke:var(--line);stroke-width:1.5}\
.done{--state:var(--done)}.running{--state:var(--running)}.failed,.retried,.interrupted,.canceled{--state:var(--failed)}.waiting{--state:var(--waiting)}\
.skipped{--state:var(--skipped)}.cached{--state:var(--cached)}rect.interrupted,rect.canceled,rect.skipped{stroke-dasharray:4 3}\
.row{display:grid;grid-template-columns:11rem 1fr;gap:.6rem}.row+.row{margin-top:3px}.name{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}\
.track,.axis{position:relative;height:1.4rem;font-size:.75rem;line-height:1.4rem}\
.track{background:repeating-linear-gradient(90deg,var(--line) 0 1px,transparent 1px var(--tick)) var(--box)}\
.axis span{position:absolute;color:var(--muted);white-space:nowrap}.track .note{padding-left:.4rem;color:var(--muted)}\
.bar{box-sizing:border-box;display:inline-block;border:2px solid var(--state);border-radius:2px;background:var(--state)}\
.track .bar{position:absolute;top:.15rem;height:1.1rem;min-width:4px}.track .cached{min-width:10px}.bar.cached,.bar.interrupted{background:var(--page)}.bar.interrupted{border-style:dashed}\
.bar.retried{background:repeating-linear-gradient(45deg,var(--state) 0 3px,var(--page) 3px 6px)}\
.bar.running{background:repeating-linear-gradient(90deg,var(--state) 0 8px,var(--page) 8px 10px)}\
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.6rem 0 0;font-size:.85rem}.legend .bar{width:1.2rem;height:.8rem;margin-right:.4rem}\
section{border:1px solid var(--line);border-left:4px solid var(--state);border-radius:4px;padding:.6rem .9rem;margin:.8rem 0}\
dl{display:grid;grid-template-columns:5.5rem minmax(0,1fr);gap:.2rem .8rem;margin:.4rem 0}dt{color:var(--muted)}dd{margin:0}summary{cursor:pointer;color:var(--muted)}\
pre{background:var(--box);padding:.6rem;margin:.4rem 0 0;font-size:.85rem;white-space:pre-wrap;overflow-wrap:anywhere}\
@media(max-width:40rem){.row{display:block}}";

/// What a URL's path may have as it is.
const IN_A_PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'.')
    .remove(b'_')
    .remove(b'-');

/// Text for HTML and SVG.
fn escape(text: &str) -> String {
    // The ampersands of the others are not replaced.
    let text = phalanx_base::text::visible(text).replace('&', "&amp;");
    let text = text.replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;").replace('\'', "&#39;")
}

/// The state as a word, which is the class of its colour too.
fn word(node: &Node) -> &'static str {
    match node.state {
        State::Done if node.cached.is_some() => "cached",
        state => state.name(),
    }
}

/// The time of all attempts that have ended.
fn total(node: &Node) -> String {
    let attempts = node.attempts.iter();
    let ms = attempts.filter_map(|a| Some(a.ended?.saturating_sub(a.started)));
    let sum = ms.reduce(u64::saturating_add);
    sum.map_or_else(String::new, |sum| took(0, Some(sum)))
}

/// The graph as SVG: tasks in columns, each right of those that it needs.
fn picture(workflow: &Workflow, nodes: &[(String, Node)]) -> String {
    const WIDTH: usize = 190;
    const HEIGHT: usize = 48;
    const GAP_X: usize = 70;
    const GAP_Y: usize = 22;
    let mut places: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    let mut filled: Vec<usize> = Vec::new();
    // Each task comes after those that it needs.
    for task in &workflow.tasks {
        let needed = task.dependencies();
        let columns = needed
            .iter()
            .filter_map(|name| Some(places.get(name)?.0 + 1));
        let column = columns.max().unwrap_or(0);
        filled.resize(filled.len().max(column + 1), 0);
        places.insert(&task.name, (column, filled[column]));
        filled[column] += 1;
    }
    let rows = filled.iter().copied().max().unwrap_or(1);
    let (width, height) = (
        filled.len() * (WIDTH + GAP_X) - GAP_X + 4,
        rows * (HEIGHT + GAP_Y) - GAP_Y + 4,
    );
    let corner = |(column, row): (usize, usize)| {
        // Columns are centred.
        let free = (rows - filled[column]) * (HEIGHT + GAP_Y) / 2;
        (
            2 + column * (WIDTH + GAP_X),
            2 + free + row * (HEIGHT + GAP_Y),
        )
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" style=\"width:100%;max-width:{width}px;min-width:{}px\" role=\"img\" aria-label=\"tasks of {}\">\n",
        // On a narrow screen it is scrolled before its text is too small to read.
        width * 3 / 4,
        escape(&workflow.name)
    );
    for task in &workflow.tasks {
        let (to_x, to_y) = corner(places[task.name.as_str()]);
        for from in task.dependencies() {
            let Some(place) = places.get(from) else {
                continue;
            };
            let (x, y) = corner(*place);
            let (x, y, to_y) = (x + WIDTH, y + HEIGHT / 2, to_y + HEIGHT / 2);
            let middle = (x + to_x) / 2;
            svg.push_str(&format!(
                "<path d=\"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}\"/>\n"
            ));
        }
    }
    for (name, node) in nodes {
        let Some(place) = places.get(name.as_str()) else {
            continue;
        };
        let (x, y) = corner(*place);
        let short: String = match name.chars().count() > 22 {
            true => name.chars().take(21).chain(['\u{2026}']).collect(),
            false => name.clone(),
        };
        let state = word(node);
        svg.push_str(&format!(
            "<g><title>{0}: {state}</title><rect class=\"{state}\" x=\"{x}\" y=\"{y}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"8\"/>\
             <text x=\"{1}\" y=\"{2}\">{3}</text><text class=\"small\" x=\"{1}\" y=\"{4}\">{state} {5}</text></g>\n",
            escape(name),
            x + 12,
            y + 20,
            escape(&short),
            y + 38,
            escape(&total(node)),
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

/// What a bar of the timeline is, as its class and in the legend.
fn kind(run: &Run, node: &Node, at: usize) -> &'static str {
    let attempt = &node.attempts[at];
    match attempt.end.as_deref() {
        Some("done") => "done",
        None if run.state == State::Running => "running",
        Some(_) if attempt.counts => match at + 1 < node.attempts.len() {
            true => "retried",
            false => "failed",
        },
        _ => "interrupted",
    }
}

/// Distance of marks on an axis of this length, at most six, and their unit.
fn marks(length: u64) -> (u64, u64, &'static str) {
    const SECOND: u64 = 1000;
    let (unit, name) = match length {
        0..=120_000 => (SECOND, "s"),
        120_001..=7_200_000 => (60 * SECOND, "min"),
        _ => (3600 * SECOND, "h"),
    };
    let steps = (0..).flat_map(|power| [1, 2, 5].map(|n| n * 10u64.pow(power) * unit / 100));
    let step = steps.into_iter().find(|step| length / step < 6);
    (step.unwrap_or(unit), unit, name)
}

/// The attempts over time, one row a task.
fn timeline(run: &Run, nodes: &[(String, Node)]) -> String {
    let times = |a: &Attempt| [Some(a.started), a.ended];
    let known = nodes.iter().flat_map(|(_, node)| &node.attempts);
    let last = known.flat_map(times).flatten().max().unwrap_or(run.started);
    let end = match run.state {
        State::Running => now(),
        _ => run.ended.unwrap_or(last),
    };
    let length = end.saturating_sub(run.started).max(1);
    let percent = |ms: u64| 100.0 * ms as f64 / length as f64;
    let at = |time: u64| percent(time.saturating_sub(run.started).min(length));
    let (step, unit, name) = marks(length);
    let mut html = format!("<div style=\"--tick:{:.4}%\">\n", percent(step));
    let mut kinds = Vec::new();
    // When each task was done, or known from the cache.
    let mut ends: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, node) in nodes {
        let mut bars = String::new();
        let mut bar = |kind: &'static str, from: u64, to: u64, title: String| {
            let _ = write!(
                bars,
                "<span class=\"bar {kind}\" style=\"left:min({:.3}%,100% - 10px);width:{:.3}%\" title=\"{}\"></span>",
                at(from),
                at(to) - at(from),
                escape(&title)
            );
            kinds.push(kind);
        };
        for (number, attempt) in node.attempts.iter().enumerate() {
            let kind = kind(run, node, number);
            let title = format!("{name}, attempt {}", attempt_text(run, node, number));
            bar(kind, attempt.started, attempt.ended.unwrap_or(end), title);
        }
        let ended = node.attempts.iter().filter_map(|attempt| attempt.ended);
        let mut done = ended.max().unwrap_or(run.started);
        if let Some(from) = &node.cached {
            let needed = run.workflow.task(name).map(Task::dependencies);
            let needed = needed.into_iter().flatten();
            done = needed
                .filter_map(|task| ends.get(task).copied())
                .fold(done, u64::max);
            bar("cached", done, done, format!("{name}: cached, from {from}"));
        } else if node.attempts.is_empty() {
            bars = format!("<span class=\"note\">{}</span>", node.state.name());
        }
        ends.insert(name, done);
        let _ = writeln!(
            html,
            "<div class=\"row\"><div class=\"name\" title=\"{0}\">{0}</div><div class=\"track\">{bars}</div></div>",
            escape(name)
        );
    }
    let ticks = (0..=length / step).map(|n| {
        let place = percent(n * step);
        // The last one ends where the axis does.
        let shift = if place > 92.0 {
            ";transform:translateX(-100%)"
        } else {
            ""
        };
        let value = (n * step) as f64 / unit as f64;
        format!("<span style=\"left:{place:.3}%{shift}\">{value} {name}</span>")
    });
    let ticks: String = ticks.collect();
    let _ = write!(
        html,
        "<div class=\"row\"><div></div><div class=\"axis\">{ticks}</div></div>\n<p class=\"legend\">"
    );
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        let text = match kind {
            "retried" => "failed, tried again",
            "cached" => "cached (no attempt)",
            kind => kind,
        };
        let _ = write!(
            html,
            "<span><span class=\"bar {kind}\"></span>{text}</span>"
        );
    }
    html.push_str("</p></div>\n");
    html
}

/// `1: exit code 1, 0.2 s (limits)`.
fn attempt_text(run: &Run, node: &Node, at: usize) -> String {
    let attempt = &node.attempts[at];
    let end = attempt.end.as_deref().unwrap_or(kind(run, node, at));
    let mut text = format!("{}: {end}", at + 1);
    if attempt.ended.is_some() {
        let _ = write!(text, ", {}", took(attempt.started, attempt.ended));
    }
    if !attempt.gpus.is_empty() {
        let _ = write!(text, ", GPU {}", attempt.gpus.join(", "));
    }
    if !attempt.limits.is_empty() {
        let _ = write!(text, " ({})", attempt.limits);
    }
    text
}

fn settings(task: &Task) -> Vec<String> {
    let resources = |what: &str, of: &Resources| {
        let all = [
            of.cpus.map(|n| format::plural(n as usize, "processor")),
            of.memory.map(|bytes| format!("memory {}", size(bytes))),
            of.gpus.map(|n| format::plural(n as usize, "GPU")),
            of.storage.map(|bytes| format!("storage {}", size(bytes))),
            (of.ephemeral_storage).map(|bytes| format!("ephemeral storage {}", size(bytes))),
        ];
        let all: Vec<String> = all.into_iter().flatten().collect();
        (!all.is_empty()).then(|| format!("{what}: {}", all.join(", ")))
    };
    let duration = |d| humantime::format_duration(d);
    let retries = match task.retries.times {
        0 => "no retries".to_owned(),
        times => format!(
            "retries: {times}, the first after {}",
            duration(task.retries.backoff)
        ),
    };
    let cache = task.cache.as_ref();
    let secrets = task.secrets.join(", ");
    let lines = [
        Some(retries),
        task.timeout
            .map(|limit| format!("timeout: {}", duration(limit))),
        resources("requests", &task.requests),
        resources("limits", &task.limits),
        (!secrets.is_empty()).then(|| format!("secrets: {secrets}")),
        Some(cache.map_or("not cached".to_owned(), |version| {
            format!("cache version: {version}")
        })),
    ];
    lines.into_iter().flatten().collect()
}

/// The link from a page in the folder `from` to `to`; both are absolute.
fn link(from: &Path, to: &Path) -> String {
    let same = from.components().zip(to.components());
    let same = same.take_while(|(a, b)| a == b).count();
    let up = from.components().skip(same).map(|_| Component::ParentDir);
    let path: PathBuf = up.chain(to.components().skip(same)).collect();
    utf8_percent_encode(&path.to_string_lossy(), IN_A_PATH).to_string()
}

/// The page, which needs no other file. Links are relative to the folder `from`.
pub(crate) fn page(
    store: &Store,
    id: &str,
    run: &Run,
    nodes: &[(String, Node)],
    from: &Path,
) -> String {
    let writer = Writer {
        store,
        from: real(from),
    };
    let sections = nodes.iter();
    let sections: String = sections
        .map(|(name, node)| writer.section((id, run), name, node))
        .collect();
    let took = run.ended.map_or(String::new(), |end| {
        format!(", took {}", took(run.started, Some(end)))
    });
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{id}: {state}</title><style>{STYLE}</style></head><body>\n\
         <h1>{id}: {state}</h1>\n<p class=\"muted\">Started {started}{took}. Limits by {limits}.</p>\n<div class=\"wide\">{picture}</div>\n\
         <dl>{inputs}{outputs}</dl>\n<h2>Timeline</h2>\n{timeline}<h2>Tasks</h2>\n{sections}</body></html>\n",
        id = escape(id),
        state = run.state.name(),
        started = escape(&time(run.started)),
        limits = escape(&run.limits),
        picture = picture(&run.workflow, nodes),
        inputs = line("Inputs", &writer.values(&run.inputs)),
        outputs = line("Outputs", &writer.values(&run.outputs)),
        timeline = timeline(run, nodes),
    )
}

fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn line(label: &str, html: &str) -> String {
    match html {
        "" => String::new(),
        html => format!("<dt>{label}</dt><dd>{html}</dd>\n"),
    }
}

/// Writes parts of a page that is in the folder `from`.
struct Writer<'a> {
    store: &'a Store,
    from: PathBuf,
}

impl Writer<'_> {
    fn link(&self, path: &Path, text: &str) -> String {
        let shown = escape(&path.display().to_string());
        format!(
            "<a href=\"{}\" title=\"{shown}\">{text}</a>",
            link(&self.from, &real(path))
        )
    }

    fn values(&self, items: &Items) -> String {
        let value = |(name, item): (&String, &Item)| {
            let text = match item {
                Item::Value(_) => {
                    let text = shown(self.store, item);
                    match text.char_indices().nth(300) {
                        Some((end, _)) => escape(&text[..end]) + "\u{2026}",
                        None => escape(&text),
                    }
                }
                Item::Object(object) => {
                    let text = format!("{} {}", object.kind, &object.sha256[..8]);
                    let link = self.link(&self.store.objects.path(object), &text);
                    format!("{link}, {}", size(object.bytes).replace(' ', "\u{a0}"))
                }
            };
            format!("{} = {text}", escape(name))
        };
        items.iter().map(value).collect::<Vec<_>>().join("<br>")
    }

    /// The task `name` of the run `id`.
    fn section(&self, (id, run): (&str, &Run), name: &str, node: &Node) -> String {
        let store = self.store;
        let report = |(folder, of): (PathBuf, String)| {
            let report = folder.join("report.html");
            let link = report
                .is_file()
                .then(|| self.link(&report, "report.html"))?;
            Some(format!("{link}{of}<br>"))
        };
        let task = run.workflow.task(name);
        let attempts = 0..node.attempts.len();
        let attempts = attempts.map(|at| escape(&attempt_text(run, node, at)));
        let cached = node.cached.iter();
        let cached = cached.map(|run| format!("cached from {}", escape(run)));
        let attempts: Vec<String> = attempts.chain(cached).collect();
        let objects = objects_in(&node.outputs);
        let objects = objects.map(|(_, object)| (store.objects.path(object), String::new()));
        // Outputs of an attempt that has not ended well are where it wrote them.
        let tried = (1..=node.attempts.len()).flat_map(|attempt| {
            let dir = outputs_dir(&store.attempt_dir(id, name, attempt));
            let outputs = task.into_iter().flat_map(|task| task.outputs.keys());
            outputs.map(move |output| (dir.join(output), format!(" of attempt {attempt}")))
        });
        let reports: String = objects.chain(tried).filter_map(report).collect();
        let settings = task.map(settings).unwrap_or_default().into_iter();
        let settings = settings.map(|line| escape(&line));
        let log = match node.attempts.len() {
            0 => Vec::new(),
            last => last_lines(&store.attempt_dir(id, name, last), 20),
        };
        let log = match (log.is_empty(), node.state) {
            (true, _) => String::new(),
            (false, state) => format!(
                "<details{}><summary>End of the log</summary><pre>{}</pre></details>",
                if state == State::Failed { " open" } else { "" },
                escape(&log.join("\n"))
            ),
        };
        format!(
            "<section class=\"{state}\"><h3>{}</h3><span class=\"muted\">{state} {}</span>\n<dl>{}{}{}{}</dl>{log}</section>\n",
            escape(name),
            escape(&total(node)),
            line("Report", &reports),
            line("Attempts", &attempts.join("<br>")),
            line("Outputs", &self.values(&node.outputs)),
            line("Settings", &settings.collect::<Vec<_>>().join("<br>")),
            state = word(node),
        )
    }
}

/// A value as text, a file or folder as its path.
pub(crate) fn shown(store: &Store, item: &Item) -> String {
    match item {
        Item::Value(serde_json::Value::String(text)) => text.clone(),
        Item::Value(value) => value.to_string(),
        Item::Object(object) => store.objects.path(object).display().to_string(),
    }
}

pub(crate) fn time(ms: u64) -> String {
    let time = std::time::SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms));
    time.map_or_else(String::new, |time| {
        humantime::format_rfc3339_seconds(time).to_string()
    })
}

/// `3.2 s`, from and to in milliseconds.
pub(crate) fn took(from: u64, to: Option<u64>) -> String {
    let Some(to) = to else { return "-".to_owned() };
    format!(
        "{:.1} s",
        Duration::from_millis(to.saturating_sub(from)).as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn tasks_are_right_of_those_that_they_need() {
        let text = "name = \"w\"\n[tasks.a]\nshell = \"\"\n[tasks.b]\nshell = \"\"\nafter = [\"a\"]\n[tasks.c]\nshell = \"\"\nafter = [\"a\"]\n";
        let flow = Workflow::from_toml(text, Path::new("/"), "f").unwrap();
        let nodes: Vec<(String, Node)> =
            ["a", "b", "c"].map(|n| (n.to_owned(), Node::new())).into();
        let svg = picture(&flow, &nodes);
        assert_eq!(svg.matches("<path ").count(), 2);
        assert_eq!(svg.matches("<rect class=\"waiting\" x=\"2\"").count(), 1);
        assert_eq!(svg.matches("<rect class=\"waiting\" x=\"262\"").count(), 2);
    }

    #[test]
    fn bars_are_where_their_times_are() {
        let mut run = crate::store::tests::run(1, State::Failed, 1000);
        run.ended = Some(5000);
        let attempt = |started, ended, end: &str| Attempt {
            started,
            ended: Some(ended),
            end: Some(end.to_owned()),
            ..Attempt::new(String::new(), Vec::new())
        };
        let mut a = Node::new();
        a.attempts = vec![
            attempt(1000, 2000, "exit code 1"),
            attempt(3000, 5000, "done"),
        ];
        let mut b = Node::new();
        b.cached = Some("w-0".to_owned());
        let html = timeline(&run, &[("a".to_owned(), a), ("b".to_owned(), b)]);
        let bars: Vec<&str> = html.split("<span class=\"bar ").skip(1).collect();
        assert!(bars[0].starts_with("retried\" style=\"left:min(0.000%"));
        assert!(bars[0].contains("width:25.000%\" title=\"a, attempt 1: exit code 1, 1.0 s\""));
        assert!(bars[1].starts_with("done\" style=\"left:min(50.000%"));
        assert!(bars[1].contains("width:50.000%"));
        assert!(bars[2].contains("width:0.000%\" title=\"b: cached, from w-0\""));
        let ticks = [
            "0%\">0 s<",
            "25.000%\">1 s<",
            "transform:translateX(-100%)\">4 s<",
        ];
        assert!(ticks.iter().all(|tick| html.contains(tick)), "{html}");
    }

    #[test]
    fn an_axis_has_two_to_six_marks() {
        for (length, want) in [
            (20_000, (5_000, 1000, "s")),
            (600_000, (120_000, 60_000, "min")),
            (86_400_000, (18_000_000, 3_600_000, "h")),
        ] {
            assert_eq!(marks(length), want);
        }
        for length in (20..1_000_000).step_by(77) {
            assert!((1..6).contains(&(length / marks(length).0)), "{length}");
        }
    }

    #[test]
    fn links_are_relative() {
        let link = |from: &str, to: &str| link(Path::new(from), Path::new(to));
        assert_eq!(link("/a/b", "/a/b/c.html"), "c.html");
        assert_eq!(link("/a/b/d", "/a/c d#/\u{e9}"), "../../c%20d%23/%C3%A9");
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(
            escape("<a b='&\">\u{1b}"),
            "&lt;a b=&#39;&amp;&quot;&gt;\\u{1b}"
        );
    }
}
