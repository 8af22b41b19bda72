//! `--explain`: how parameters lie on a mesh, and what the first step converts.

use phalanx_global::{Conversion, GlobalParams};

use crate::format::{bytes, thousands};

/// Parameters that lie alike, a line for each name with `*` for its numbers.
pub fn layouts(params: &GlobalParams) -> String {
    let infos = params.local().infos();
    let all = params.local().ids().zip(infos).map(|(id, info)| {
        let layout = params.layout(id);
        let text = format!("{} {layout}", numberless(&info.name));
        (text, layout.shape().iter().product(), info.len)
    });
    let mut lines = String::from("layout   of the parameters, as [shape] (SBP over the mesh):");
    for (count, text, [numel, own]) in grouped(all.map(|(text, n, own)| (text, [n, own]))) {
        lines.push_str(&format!(
            "\n  {count:>3} x {text}: {} of {} elements on rank 0",
            thousands(own),
            thousands(numel)
        ));
    }
    lines
}

/// The conversions of a step's forward pass, equal ones once.
pub fn conversions(all: &[Conversion]) -> String {
    let mut lines = String::from(
        "explain  conversions of the first step's forward pass; the backward pass converts the gradients back:",
    );
    if all.is_empty() {
        lines.push_str("\n  none: every operation has its operands as it needs them");
    }
    let texts = all.iter().map(|conversion| {
        let (boxing, operation) = (&conversion.boxing, &conversion.operation);
        let shape = format!("{:?} ", boxing.from().shape());
        let [from, to] = [boxing.from(), boxing.to()].map(|layout| {
            let text = layout.to_string();
            text.strip_prefix(&shape)
                .map_or(text.clone(), str::to_owned)
        });
        // What each line after the first does, without its result.
        let shown = boxing.to_string();
        let steps = shown
            .lines()
            .skip(1)
            .filter_map(|line| line.split(": ").next());
        let steps: Vec<&str> = steps.map(str::trim).collect();
        let text = format!(
            "{operation}, {}: {shape}{from} to {to} by {}",
            numberless(&conversion.operand),
            steps.join(", "),
        );
        (text, [boxing.bytes_sent(0)])
    });
    let mut total = 0;
    for (count, text, [sent]) in grouped(texts) {
        lines.push_str(&format!("\n  {count:>3} x {text}; {} sent", bytes(sent)));
        total += sent;
    }
    lines.push_str(&format!(
        "\n  rank 0 sends {} for them (over shared memory ranks read each other's instead)",
        bytes(total)
    ));
    lines
}

/// `h.0.attn` as `h.*.attn`.
fn numberless(name: &str) -> String {
    let part = |part| match str::parse::<usize>(part) {
        Ok(_) => "*",
        Err(_) => part,
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// Equal texts once, in the order of their first: how often, and the sums of their numbers.
fn grouped<const N: usize>(
    all: impl Iterator<Item = (String, [usize; N])>,
) -> Vec<(usize, String, [usize; N])> {
    let mut groups: Vec<(usize, String, [usize; N])> = Vec::new();
    for (text, numbers) in all {
        match groups.iter_mut().find(|(_, known, _)| *known == text) {
            Some((count, _, sums)) => {
                *count += 1;
                sums.iter_mut().zip(numbers).for_each(|(sum, n)| *sum += n);
            }
            None => groups.push((1, text, numbers)),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lines_are_counted() {
        assert_eq!(numberless("h.12.attn.q1"), "h.*.attn.q1");
        let all = [("a", 1), ("b", 2), ("a", 3)].map(|(text, n)| (text.to_owned(), [n]));
        let groups = grouped(all.into_iter());
        assert_eq!(groups, [(2, "a".to_owned(), [4]), (1, "b".to_owned(), [2])]);
    }
}
