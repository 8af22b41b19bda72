//! Chooses the method that carries out a collective.
//!
//! Pure functions of what all ranks know alike (sizes, hosts, agreed costs,
//! rules), so all ranks choose alike. What was chosen is in every frame header;
//! ranks that were configured differently find out at the first frame.
//!
//! Only plans in canonical order are chosen unless another is requested
//! ([`Algorithm::Fastest`] allows any). All canonical plans give the same bits, so
//! measurements and choices do not affect results.

mod cost;
mod rules;

pub use cost::Costs;
pub use rules::Rules;

use crate::DType;
use crate::plan::{Collective, Hosts, Method};

/// How all-reduce is carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// The plan predicted to be fastest among those in canonical order.
    #[default]
    Auto,
    /// Reduce-scatter by chunk owners, then all-gather: two rounds, least
    /// bytes, canonical order.
    Direct,
    /// Every rank sends all its data to every other and folds all of it: one round,
    /// canonical order.
    OneRound,
    /// Over a ring: each rank sends only to its successor and receives only
    /// from its predecessor, in `2(P − 1)` steps. The order of additions is
    /// fixed and the same on all ranks, but not canonical.
    Ring,
    /// On each host, then across hosts by as many rails as a host has ranks,
    /// then on each host: least bytes between hosts. The order of additions is
    /// fixed and the same on all ranks (by hosts), but not canonical.
    Hierarchical,
    /// On each host, then from host to host and back: canonical order, more
    /// bytes between more than two hosts. (f16 and bf16 are rounded once per
    /// host on the way.)
    Chain,
    /// The plan predicted to be fastest, whatever its order of additions. It is the
    /// same on all ranks, but the last bits may differ between runs whose network
    /// measurements or data sizes differ.
    Fastest,
}

phalanx_fold::named! {
    Algorithm: Auto "auto", Direct "direct", OneRound "one-round", Ring "ring",
    Hierarchical "hierarchical", Chain "chain", Fastest "fastest"
}

impl Algorithm {
    /// A line of help.
    pub const fn summary(self) -> &'static str {
        match self {
            Algorithm::Auto => "Chosen by size; always adds in ascending rank order",
            Algorithm::Direct => "Each rank adds one chunk of all ranks, then sends it to all",
            Algorithm::OneRound => "Every rank sends its data to all and adds all; lowest latency",
            Algorithm::Ring => "Ring: each rank exchanges data with its neighbours only",
            Algorithm::Hierarchical => {
                "Reduce-scatter on each host, all-reduce across hosts, all-gather on each host"
            }
            Algorithm::Chain => {
                "Reduce on each host, then pass from host to host and back, in ascending rank order"
            }
            Algorithm::Fastest => "Chosen by size, in the fastest order of additions",
        }
    }

    const fn method(self) -> Option<Method> {
        match self {
            Algorithm::Auto | Algorithm::Fastest => None,
            Algorithm::Direct => Some(Method::AllReduceDirect),
            Algorithm::OneRound => Some(Method::AllReduceOneRound),
            Algorithm::Ring => Some(Method::AllReduceRing),
            Algorithm::Hierarchical => Some(Method::AllReduceRails),
            Algorithm::Chain => Some(Method::AllReduceChain),
        }
    }
}

impl std::str::FromStr for Algorithm {
    type Err = crate::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = text.replace('_', "-");
        let found = Self::ALL.into_iter().find(|a| a.name() == name);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            crate::Error::usage(format!(
                "unknown all-reduce algorithm {text:?}: choose one of {names}"
            ))
        })
    }
}

/// Most data that is folded in one round: beyond it the scratch memory costs more than
/// the synchronisation.
const ONE_ROUND_MAX_BYTES: usize = 64 << 10;
/// Data that is always folded in one round on one host (docs/design/collectives.md §1).
const ONE_ROUND_MIN_BYTES: usize = 2 << 10;
/// Cost of one synchronisation, in bytes that could be moved meanwhile: 5 µs at 10 GB/s
/// (docs/design/collectives.md §1).
const SYNC_COST_BYTES: f64 = 50_000.0;
/// Up to this size a tree of whole messages beats two rounds of chunks on one host: the
/// data is no longer than a few latencies.
const BROADCAST_TREE_MAX_BYTES: usize = 64 << 10;
/// Up to this size per peer the root folds alone on one host.
const REDUCE_ROOT_MAX_BYTES: usize = 32 << 10;

/// Data up to this size is reduced in one round on one host: where the extra
/// bytes, `(P − 2 − 1/P)·n`, cost less than one more synchronisation.
pub(crate) fn one_round_max_bytes(world: usize) -> usize {
    let p = world as f64;
    let extra = p - 2.0 - 1.0 / p;
    if extra <= 0.0 {
        return ONE_ROUND_MAX_BYTES;
    }
    ((SYNC_COST_BYTES / extra) as usize).clamp(ONE_ROUND_MIN_BYTES, ONE_ROUND_MAX_BYTES)
}

/// Chooses for one group.
#[derive(Clone, Debug)]
pub struct Selector {
    hosts: Hosts,
    costs: Costs,
    rules: Rules,
}

impl Selector {
    /// All ranks of a group must give the same arguments.
    pub fn new(hosts: Hosts, costs: Costs, rules: Rules) -> Selector {
        Selector {
            hosts,
            costs,
            rules,
        }
    }

    /// Which ranks share a host.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// The constants in use.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// The rules in use.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    pub(crate) fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
    }

    /// Predicted seconds.
    pub fn predict(&self, method: Method, bytes: usize) -> f64 {
        self.costs.predict(method, bytes, &self.hosts)
    }

    /// Whether `method` takes `bytes` per rank in short segments.
    pub(crate) fn has_short_segments(&self, method: Method, bytes: usize) -> bool {
        method == Method::AllReduceDirect && self.costs.prefers_short_segments(bytes, &self.hosts)
    }

    /// The methods considered for a collective of `bytes` per rank without a rule.
    pub fn candidates(
        &self,
        collective: Collective,
        bytes: usize,
        dtype: DType,
    ) -> impl Iterator<Item = Method> {
        let all: &'static [Method] = match collective {
            Collective::AllReduce => &[
                Method::AllReduceOneRound,
                Method::AllReduceDirect,
                Method::AllReduceChain,
            ],
            Collective::Broadcast => &[
                Method::BroadcastTree,
                Method::BroadcastScatter,
                Method::BroadcastHosts,
            ],
            Collective::Reduce => &[
                Method::ReduceRoot,
                Method::ReduceOwners,
                Method::ReduceHosts,
            ],
            Collective::AllGather => &[Method::AllGather, Method::AllGatherHosts],
            Collective::ReduceScatter => &[Method::ReduceScatter, Method::ReduceScatterHosts],
            Collective::Gather => &[Method::Gather],
            Collective::Scatter => &[Method::Scatter],
            Collective::AllToAll => &[Method::AllToAll],
            Collective::Barrier | Collective::Shutdown => &[Method::Barrier],
            Collective::SendRecv => &[],
        };
        // Where hosts have one rank each, direct is as good and shorter.
        let several = self.hosts.count() > 1 && self.hosts.most_ranks() > 1;
        let wide = matches!(dtype, DType::F16 | DType::Bf16);
        all.iter().copied().filter(move |method| match method {
            Method::AllReduceOneRound => bytes <= ONE_ROUND_MAX_BYTES,
            method if method.rounds_per_host() => several && !wide,
            Method::BroadcastHosts | Method::AllGatherHosts => several,
            _ => true,
        })
    }

    /// The method for a collective of `bytes` per rank.
    pub fn choose(&self, collective: Collective, bytes: usize, dtype: DType) -> Method {
        if let Some(method) = self.rules.method(collective, bytes) {
            return method;
        }
        if self.hosts.count() <= 1
            && let Some(method) = self.on_one_host(collective, bytes)
        {
            return method;
        }
        // Of equals the first, on all ranks. Every collective has a candidate, except messages.
        let by_time = |a: &Method, b: &Method| {
            let (a, b) = (self.predict(*a, bytes), self.predict(*b, bytes));
            a.total_cmp(&b)
        };
        self.candidates(collective, bytes, dtype)
            .min_by(by_time)
            .unwrap_or(Method::Barrier)
    }

    /// Crossings that were measured on one host.
    fn on_one_host(&self, collective: Collective, bytes: usize) -> Option<Method> {
        let world = self.hosts.world();
        match collective {
            Collective::AllReduce if bytes <= one_round_max_bytes(world) => {
                Some(Method::AllReduceOneRound)
            }
            Collective::AllReduce => Some(Method::AllReduceDirect),
            Collective::Broadcast if world <= 2 || bytes <= BROADCAST_TREE_MAX_BYTES => {
                Some(Method::BroadcastTree)
            }
            Collective::Broadcast => Some(Method::BroadcastScatter),
            Collective::Reduce if world <= 1 || bytes <= REDUCE_ROOT_MAX_BYTES => {
                Some(Method::ReduceRoot)
            }
            Collective::Reduce => Some(Method::ReduceOwners),
            _ => None,
        }
    }

    pub(crate) fn all_reduce(&self, algorithm: Algorithm, bytes: usize, dtype: DType) -> Method {
        let chosen = algorithm
            .method()
            .unwrap_or_else(|| self.choose(Collective::AllReduce, bytes, dtype));
        match algorithm {
            Algorithm::Fastest => self.faster_in_any_order(chosen, bytes),
            _ => chosen,
        }
    }

    /// A method that takes less time than `canonical`, unless that was prescribed. On one host none does.
    fn faster_in_any_order(&self, canonical: Method, bytes: usize) -> Method {
        let prescribed = self.rules.method(Collective::AllReduce, bytes).is_some();
        if prescribed || self.hosts.count() <= 1 {
            return canonical;
        }
        // Where hosts have one rank each, rails are what direct is.
        let several = self.hosts.most_ranks() > 1;
        let rails = several.then_some(Method::AllReduceRails);
        let others = [Some(Method::AllReduceRing), rails];
        others.into_iter().flatten().fold(canonical, |best, other| {
            let is_less = self.predict(other, bytes) < self.predict(best, bytes);
            if is_less { other } else { best }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selector(sizes: &[usize]) -> Selector {
        Selector::new(Hosts::of_sizes(sizes), Costs::default(), Rules::default())
    }

    fn all_reduce(selector: &Selector, bytes: usize) -> Method {
        selector.choose(Collective::AllReduce, bytes, DType::F32)
    }

    #[test]
    fn one_host_keeps_its_crossings() {
        let two = selector(&[2]);
        assert_eq!(all_reduce(&two, 64 << 10), Method::AllReduceOneRound);
        assert_eq!(all_reduce(&two, (64 << 10) + 1), Method::AllReduceDirect);
        let many = selector(&[100]);
        assert_eq!(all_reduce(&many, 2 << 10), Method::AllReduceOneRound);
        assert_eq!(all_reduce(&many, 4 << 10), Method::AllReduceDirect);
        let four = selector(&[4]);
        assert_eq!(all_reduce(&four, 24 << 10), Method::AllReduceOneRound);
        assert_eq!(all_reduce(&four, 32 << 10), Method::AllReduceDirect);
    }

    /// Ranks of each host.
    const GRIDS: [&[usize]; 7] = [
        &[1],
        &[7],
        &[1, 1, 1],
        &[4, 4],
        &[2, 1, 3],
        &[8; 8],
        &[1; 64],
    ];

    #[test]
    fn nothing_is_chosen_that_leaves_canonical_order() {
        for sizes in GRIDS {
            let selector = selector(sizes);
            for bytes in [0, 4, 1 << 10, 1 << 20, 1 << 30] {
                for collective in Collective::ALL {
                    for dtype in [DType::F32, DType::F16] {
                        let method = selector.choose(collective, bytes, dtype);
                        assert!(method.canonical(), "{method:?}");
                        assert!(dtype == DType::F32 || !method.rounds_per_host());
                    }
                }
            }
        }
    }

    #[test]
    fn the_fastest_of_any_order_is_never_slower_and_sometimes_out_of_order() {
        let mut out_of_order = 0;
        for sizes in GRIDS {
            let selector = selector(sizes);
            for bytes in [0, 4, 1 << 10, 1 << 16, 1 << 20, 1 << 30] {
                let of = |algorithm| selector.all_reduce(algorithm, bytes, DType::F32);
                let (auto, fastest) = (of(Algorithm::Auto), of(Algorithm::Fastest));
                let seconds = |method| selector.predict(method, bytes);
                assert!(seconds(fastest) <= seconds(auto), "{sizes:?}, {bytes}");
                assert!(fastest == auto || !fastest.canonical());
                assert!(fastest == auto || sizes.len() > 1);
                out_of_order += usize::from(fastest != auto);
            }
        }
        assert!(out_of_order > 5, "{out_of_order}");
        let text = "all_reduce=direct".parse();
        let ruled = Selector::new(
            Hosts::of_sizes(&[8; 8]),
            Costs::default(),
            text.expect("a rule"),
        );
        let method = ruled.all_reduce(Algorithm::Fastest, 1 << 30, DType::F32);
        assert_eq!(method, Method::AllReduceDirect);
    }

    #[test]
    fn many_ranks_on_many_hosts_are_chained() {
        let grid = selector(&[4, 4, 4]);
        assert_eq!(all_reduce(&grid, 25 << 20), Method::AllReduceChain);
        assert_eq!(
            grid.choose(Collective::AllReduce, 25 << 20, DType::Bf16),
            Method::AllReduceDirect
        );
        assert_eq!(all_reduce(&grid, 64), Method::AllReduceOneRound);
        assert_eq!(
            all_reduce(&selector(&[1, 1, 1]), 25 << 20),
            Method::AllReduceDirect
        );
    }

    #[test]
    fn segments_are_short_where_a_slow_wire_joins_more_than_two_hosts() {
        let over = |sizes: &[usize], gbit: f64, wire_latency_s, bytes| {
            let mut selector = selector(sizes);
            selector.set_costs(Costs {
                wire_latency_s,
                wire_bytes_per_s: gbit * 1e9 / 8.0,
                ..Costs::default()
            });
            let method = all_reduce(&selector, bytes);
            (method, selector.has_short_segments(method, bytes))
        };
        let (long, short) = (
            (Method::AllReduceDirect, false),
            (Method::AllReduceDirect, true),
        );
        let at = |sizes: &[usize], gbit, bytes| over(sizes, gbit, 30e-6, bytes);
        for hosts in [3, 4, 16] {
            let sizes = vec![1; hosts];
            assert_eq!(at(&sizes, 1.0, 25 << 20), short);
            assert_eq!(at(&sizes, 10.0, 25 << 20), long);
            // A chunk has few segments anyway.
            assert_eq!(at(&sizes, 1.0, 512 << 10), long);
        }
        // Too little would be under way.
        let far = |latency_s| over(&[1; 4], 1.0, latency_s, 25 << 20);
        assert_eq!(far(5e-3), short);
        assert_eq!(far(50e-3), long);
        // Nothing shares a card.
        assert_eq!(at(&[1, 1], 1.0, 25 << 20), long);
        assert!(!at(&[4, 4, 4], 1.0, 25 << 20).1);
    }

    #[test]
    fn what_is_not_reduced_goes_to_each_host_once() {
        let grid = selector(&[4, 4, 4]);
        let choose =
            |selector: &Selector, collective, bytes| selector.choose(collective, bytes, DType::F32);
        for bytes in [4 << 10, 1 << 20, 25 << 20] {
            let broadcast = choose(&grid, Collective::Broadcast, bytes);
            assert_eq!(broadcast, Method::BroadcastHosts, "{bytes}");
        }
        for bytes in [64 << 10, 1 << 20] {
            let all_gather = choose(&grid, Collective::AllGather, bytes);
            assert_eq!(all_gather, Method::AllGatherHosts, "{bytes}");
        }
        let flat = selector(&[1, 1, 1]);
        for collective in [Collective::Broadcast, Collective::AllGather] {
            let method = choose(&flat, collective, 1 << 20);
            assert!(
                flat.candidates(collective, 1 << 20, DType::F32)
                    .any(|m| m == method)
            );
            assert_ne!(method.name(), "hosts");
        }
    }

    #[test]
    fn what_is_reduced_goes_through_each_host_once() {
        let choose = |sizes: &[usize], collective, dtype| {
            let bytes = 4 << 20;
            selector(sizes).choose(collective, bytes, dtype)
        };
        let cases = [
            (Collective::Reduce, Method::ReduceHosts),
            (Collective::ReduceScatter, Method::ReduceScatterHosts),
        ];
        for (collective, method) in cases {
            let by = |sizes, dtype| choose(sizes, collective, dtype);
            assert_eq!(by(&[4, 4, 4], DType::F32), method);
            assert_eq!(by(&[8, 8], DType::F64), method);
            // Rounded on every host, it would not be canonical.
            assert_ne!(by(&[4, 4, 4], DType::Bf16), method);
            // Nothing to fold inside.
            assert_ne!(by(&[1, 1, 1], DType::F32), method);
        }
    }

    #[test]
    fn small_data_of_many_hosts_takes_one_round() {
        let many = selector(&[1; 64]);
        assert_eq!(all_reduce(&many, 64), Method::AllReduceOneRound);
        assert_eq!(all_reduce(&many, 25 << 20), Method::AllReduceDirect);
        let few = selector(&[1; 8]);
        assert_eq!(all_reduce(&few, 64), Method::AllReduceOneRound);
    }

    #[test]
    fn rules_and_algorithms_go_before_predictions() {
        let mut selector = selector(&[2, 2]);
        selector.rules = "all_reduce=ring:1MiB-".parse().unwrap();
        assert_eq!(all_reduce(&selector, 1 << 20), Method::AllReduceRing);
        let asked = |algorithm| selector.all_reduce(algorithm, 1 << 20, DType::F32);
        assert_eq!(asked(Algorithm::Auto), Method::AllReduceRing);
        assert_eq!(asked(Algorithm::Hierarchical), Method::AllReduceRails);
    }

    #[test]
    fn names_parse_back() {
        for a in Algorithm::ALL {
            assert_eq!(a.name().parse::<Algorithm>().ok(), Some(a));
        }
        let error = "rings".parse::<Algorithm>().unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Usage);
        assert!(error.to_string().contains("ring, hierarchical"), "{error}");
    }
}
