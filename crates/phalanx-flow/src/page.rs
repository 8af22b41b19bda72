//! A run as one HTML page: its graph as a picture, its tasks as a table, the ends of its logs.

use std::collections::BTreeMap;

use crate::child::log_file;
use crate::cli::{shown, took};
use crate::engine::last_lines;
use crate::spec::Workflow;
use crate::store::{Items, Node, Run, State, Store};

const STYLE: &str = "\
:root{color-scheme:light dark;--text:#1d2330;--muted:#667085;--page:#fff;--box:#f2f4f7;--line:#98a2b3;\
--done:#12805c;--running:#1f6feb;--failed:#c6352b;--waiting:#667085;--skipped:#98a2b3;--cached:#7a5af8}\
@media(prefers-color-scheme:dark){:root{--text:#e6e9ef;--muted:#98a2b3;--page:#14171d;--box:#20252e;--line:#5d6677;\
--done:#3ecf8e;--running:#6ea8fe;--failed:#ff7b72;--waiting:#98a2b3;--skipped:#5d6677;--cached:#b4a2ff}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);max-width:70rem;margin:2rem auto;padding:0 1rem}\
svg{max-width:100%;height:auto}svg text{fill:var(--text);font:14px system-ui,sans-serif}svg .small{fill:var(--muted);font-size:12px}\
rect{fill:var(--box);stroke-width:2}path{fill:none;stroke:var(--line);stroke-width:1.5}\
.done{stroke:var(--done)}.running{stroke:var(--running)}.failed{stroke:var(--failed)}.waiting{stroke:var(--waiting)}\
.interrupted{stroke:var(--failed);stroke-dasharray:4 3}.skipped{stroke:var(--skipped);stroke-dasharray:4 3}.cached{stroke:var(--cached)}\
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.3rem .6rem;border-bottom:1px solid var(--box)}\
pre{background:var(--box);padding:.6rem;overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere}td{overflow-wrap:anywhere}";

/// Text for HTML and SVG.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in phalanx_data::text::visible(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// The state as a word, which is the class of its colour too.
fn word(node: &Node) -> &'static str {
    match node.state {
        State::Done if node.cached.is_some() => "cached",
        state => state.name(),
    }
}

fn total(node: &Node) -> String {
    let ms = node
        .attempts
        .iter()
        .filter_map(|a| Some(a.ended?.saturating_sub(a.started)));
    match node.attempts.is_empty() {
        true => String::new(),
        false => took(0, Some(ms.sum())),
    }
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
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"tasks of {}\">\n",
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

/// The page, which needs no other file.
pub(crate) fn page(store: &Store, id: &str, run: &Run, nodes: &[(String, Node)]) -> String {
    let list = |items: &Items| {
        let lines = items
            .iter()
            .map(|(name, item)| format!("{} = {}", escape(name), escape(&shown(store, item))));
        lines.collect::<Vec<_>>().join("<br>")
    };
    let mut rows = String::new();
    let mut logs = String::new();
    for (name, node) in nodes {
        let attempts = node.attempts.iter().enumerate().map(|(at, attempt)| {
            let end = attempt.end.as_deref().unwrap_or("running");
            let mut text = format!(
                "{}: {end}, {}",
                at + 1,
                took(attempt.started, attempt.ended)
            );
            if !attempt.limits.is_empty() {
                text.push_str(&format!(" ({})", attempt.limits));
            }
            escape(&text)
        });
        let cached = node
            .cached
            .iter()
            .map(|run| format!("from {}", escape(run)));
        let attempts: Vec<String> = cached.chain(attempts).collect();
        rows.push_str(&format!(
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
            escape(name),
            word(node),
            escape(&total(node)),
            attempts.join("<br>"),
            list(&node.outputs)
        ));
        let lines = match node.attempts.len() {
            0 => Vec::new(),
            last => last_lines(&log_file(&store.attempt_dir(id, name, last)), 20),
        };
        if !lines.is_empty() {
            logs.push_str(&format!(
                "<h3>{}</h3><pre>{}</pre>\n",
                escape(name),
                escape(&lines.join("\n"))
            ));
        }
    }
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{id}</title><style>{STYLE}</style></head><body>\n\
         <h1>{id}: {state}</h1>\n<p>{time}; limits by {limits}</p>\n{picture}\
         <p>{inputs}</p>\n<table><tr><th>Task</th><th>State</th><th>Time</th><th>Attempts</th><th>Outputs</th></tr>\n{rows}</table>\n\
         <p>{outputs}</p>\n<h2>Logs</h2>\n{logs}</body></html>\n",
        id = escape(id),
        state = run.state.name(),
        time = escape(&took(run.started, run.ended)),
        limits = escape(&run.limits),
        picture = picture(&run.workflow, nodes),
        inputs = list(&run.inputs),
        outputs = list(&run.outputs),
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
    fn text_is_escaped() {
        assert_eq!(
            escape("<a b='&\">\u{1b}"),
            "&lt;a b=&#39;&amp;&quot;&gt;\\u{1b}"
        );
    }
}
