use phalanx_comm::{Bucket, InitOptions, ProcessGroup, ReduceOp};
use std::sync::atomic::AtomicU32;
use std::time::Instant;

unsafe extern "C" {
    fn floor_barrier(arrived: *const AtomicU32, phase: u32);
    fn floor_pass(a: *mut f32, b: *mut f32, n: usize);
    fn k_plain(a: *mut f32, b: *mut f32, n: usize);
    fn k_plain1(a: *mut f32, b: *mut f32, n: usize);
    fn k_nan(a: *mut f32, b: *mut f32, n: usize);
    fn k_nan1(a: *mut f32, b: *mut f32, n: usize);
    fn k_pf(a: *mut f32, b: *mut f32, n: usize);
    fn k_pfw(a: *mut f32, b: *mut f32, n: usize);
    fn k_pfp(a: *mut f32, b: *mut f32, n: usize);
    fn k_pfwp(a: *mut f32, b: *mut f32, n: usize);
    fn k_or(a: *mut f32, b: *mut f32, n: usize);
    fn k_256(a: *mut f32, b: *mut f32, n: usize);
    fn k_256n(a: *mut f32, b: *mut f32, n: usize);
    fn k_512(a: *mut f32, b: *mut f32, n: usize);
    fn k_512n(a: *mut f32, b: *mut f32, n: usize);
}
type K = unsafe extern "C" fn(*mut f32, *mut f32, usize);
const KS: [(&str, K); 14] = [
    ("floor", floor_pass), ("plain", k_plain), ("plain1", k_plain1), ("nan", k_nan), ("nan1", k_nan1), ("pf+nan", k_pf), ("pfw+nan", k_pfw),
    ("pf", k_pfp), ("pfw", k_pfwp), ("or", k_or), ("256", k_256), ("256nan", k_256n), ("512", k_512), ("512nan", k_512n),
];

/// (start, end, file offset) of the mapping that has `at`, and of all with the same inode.
fn maps(at: usize) -> Vec<(usize, usize, usize)> {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    let rows: Vec<(usize, usize, usize, String)> = text.lines().map(|l| {
        let mut w = l.split_whitespace();
        let (s, e) = w.next().unwrap().split_once('-').unwrap();
        let _ = w.next();
        let off = usize::from_str_radix(w.next().unwrap(), 16).unwrap();
        let dev = w.next().unwrap().to_owned() + w.next().unwrap();
        (usize::from_str_radix(s, 16).unwrap(), usize::from_str_radix(e, 16).unwrap(), off, dev)
    }).collect();
    let ino = rows.iter().find(|r| r.0 <= at && at < r.1).unwrap().3.clone();
    rows.into_iter().filter(|r| r.3 == ino).map(|r| (r.0, r.1, r.2)).collect()
}
fn offset_of(at: usize) -> usize {
    let m = maps(at);
    let r = m.iter().find(|r| r.0 <= at && at < r.1).unwrap();
    at - r.0 + r.2
}
fn at_offset(some: usize, off: usize) -> usize {
    let m = maps(some);
    let r = m.iter().find(|r| r.2 <= off && off < r.2 + (r.1 - r.0)).unwrap();
    off - r.2 + r.0
}

fn median(v: &mut [f64]) -> f64 { v.sort_by(f64::total_cmp); v[v.len() / 2] }

/// Median over iterations of the slowest rank's time, µs.
fn time(group: &ProcessGroup, iters: usize, mut f: impl FnMut()) -> f64 {
    let mut t = Vec::with_capacity(iters);
    for _ in 0..iters {
        group.barrier().unwrap();
        let b = Instant::now();
        f();
        t.push(b.elapsed().as_secs_f64() * 1e6);
    }
    group.all_reduce(&mut t[..], ReduceOp::Max).unwrap();
    median(&mut t)
}
/// Mean of back to back calls.
fn chain(group: &ProcessGroup, iters: usize, mut f: impl FnMut()) -> f64 {
    group.barrier().unwrap();
    let b = Instant::now();
    for _ in 0..iters { f(); }
    let mut t = [b.elapsed().as_secs_f64() * 1e6 / iters as f64];
    group.all_reduce(&mut t[..], ReduceOp::Max).unwrap();
    t[0]
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let world: usize = args[1].parse().unwrap();
    let what = &args[2];
    if std::env::var("TA_RANK").is_err() {
        let file = format!("/tmp/ta/meet-{}", std::process::id());
        let kids: Vec<_> = (0..world).map(|r| std::process::Command::new(&args[0]).args(&args[1..]).env("TA_RANK", r.to_string()).env("TA_FILE", &file).spawn().unwrap()).collect();
        for mut k in kids { assert!(k.wait().unwrap().success()); }
        return;
    }
    let rank: usize = std::env::var("TA_RANK").unwrap().parse().unwrap();
    let mut options = InitOptions::default();
    options.init_method = format!("file://{}", std::env::var("TA_FILE").unwrap());
    options.rank = Some(rank);
    options.world_size = Some(world);
    let group = ProcessGroup::init(options).unwrap();
    if std::env::var("PIN").is_ok() { unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(rank % 2, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    } }
    if what == "few" { for k in 0..4 { let t = chain(&group, 500, || group.barrier().unwrap()); if rank == 0 { println!("few {k}: {t:.0} us"); } } return; }
    for _ in 0..5 { chain(&group, 2000, || group.barrier().unwrap()); }
    let rounds: usize = args.get(4).map_or(5, |s| s.parse().unwrap());
    let sizes: Vec<usize> = args.get(3).map(|s| s.split(',').map(|x| x.parse().unwrap()).collect()).unwrap_or_default();
    match what.as_str() {
        "barrier" => for _ in 0..rounds {
            let t = time(&group, 4000, || group.barrier().unwrap());
            let c = chain(&group, 20000, || group.barrier().unwrap());
            if rank == 0 { println!("barrier {world}: median {t:.2} chain {c:.2}"); }
        },
        "reg" => for &bytes in &sizes {
            let n = bytes / 4;
            let skew: usize = std::env::var("SKEW").map_or(0, |s| s.parse().unwrap());
            let _dummy: Bucket<f32> = group.bucket((skew * rank / 4).max(16));
            let mut data: Bucket<f32> = group.bucket(n);
            if std::env::var("SHOW").is_ok() { eprintln!("rank {rank}: {:p} offset {:x}", data.as_ptr(), offset_of(data.as_ptr() as usize)); }
            let flags: Bucket<u32> = group.bucket(1024);
            let (p, fl) = (data.as_ptr() as usize, flags.as_ptr() as usize);
            let mut offs = vec![0u64; 2 * world];
            group.all_gather(&[offset_of(p) as u64, offset_of(fl) as u64][..], &mut offs[..]).unwrap();
            let peer = at_offset(p, offs[2 * (1 - rank)] as usize) as *mut f32;
            let arrived = at_offset(p, offs[1] as usize) as *const AtomicU32;
            let mut phase = 0u32;
            let iters = ((200usize << 20) / bytes).clamp(20, 2000);
            let half = n / 2;
            let (s, len) = if rank == 0 { (0, half) } else { (half, n - half) };
            // rank order: a is rank 0's
            let mine = data.as_mut_ptr();
            let (a, b) = if rank == 0 { (mine, peer) } else { (peer, mine) };
            let which: Vec<&(&str, K)> = match args.get(5) { Some(l) => KS.iter().filter(|k| l == "all" || l.split(',').any(|x| x == k.0)).collect(), None => vec![&KS[0]] };
            let mut rows: Vec<Vec<f64>> = vec![Vec::new(); which.len() + 2];
            for _ in 0..rounds {
                rows[0].push(time(&group, iters, || group.all_reduce(&mut data, ReduceOp::Sum).map(drop).unwrap()));
                rows[1].push(chain(&group, iters, || group.all_reduce(&mut data, ReduceOp::Sum).map(drop).unwrap()));
                for (i, k) in which.iter().enumerate() {
                    rows[i + 2].push(time(&group, iters, || unsafe {
                        phase += 2; floor_barrier(arrived, phase);
                        k.1(a.add(s), b.add(s), len);
                        phase += 2; floor_barrier(arrived, phase);
                    }));
                }
            }
            if rank == 0 {
                let names = ["ours", "chain"].into_iter().chain(which.iter().map(|k| k.0));
                let floor = median(&mut rows[2].clone());
                print!("reg {bytes}:");
                for (name, row) in names.zip(&mut rows) { let m = median(row); print!("  {name} {m:.1} [{:.1}-{:.1}] {:.2}", row[0], row[row.len()-1], m / floor); }
                println!();
            }
        },
        "regn" => for &bytes in &sizes {
            let iters = ((100usize << 20) / bytes).clamp(20, 2000);
            let mut rows: Vec<Vec<f64>> = vec![Vec::new(); 7];
            let mut data: Bucket<f32> = group.bucket(bytes / 4);
            let mut other: Bucket<f32> = group.bucket(bytes / 4);
            let mut part: Bucket<f32> = group.bucket(bytes / 4 / world);
            let mut d16: Bucket<half::bf16> = group.bucket(bytes / 2);
            for _ in 0..rounds {
                rows[0].push(time(&group, iters, || group.all_reduce(&mut data, ReduceOp::Mean).map(drop).unwrap()));
                rows[1].push(time(&group, iters, || group.all_reduce(&mut d16, ReduceOp::Mean).map(drop).unwrap()));
                rows[2].push(time(&group, iters, || group.reduce_scatter(&mut data, &mut part, ReduceOp::Sum).map(drop).unwrap()));
                rows[3].push(time(&group, iters, || group.all_gather(&mut part, &mut data).map(drop).unwrap()));
                rows[4].push(time(&group, iters, || group.all_to_all(&mut data, &mut other).map(drop).unwrap()));
                rows[5].push(time(&group, iters, || group.broadcast(&mut data, 0).map(drop).unwrap()));
                rows[6].push(time(&group, iters, || { for x in data.iter_mut() { *x = 1.0; } group.all_reduce(&mut data, ReduceOp::Mean).map(drop).unwrap() }));
            }
            if rank == 0 {
                print!("regn {world} ranks {bytes}:");
                for (name, row) in ["f32 mean", "bf16 mean", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "fill+f32"].iter().zip(&mut rows) { let m = median(row); print!("  {name} {m:.1} [{:.1}-{:.1}]", row[0], row[row.len()-1]); }
                println!();
            }
        },
        "ops" => for &bytes in &sizes {
            let n = (bytes / 4).max(world);
            let part = n / world;
            let mut whole = vec![0f32; part * world];
            let mut other = whole.clone();
            let mut p = vec![0f32; part];
            let iters = ((100usize << 20) / bytes).clamp(20, 4000);
            let mut rows: Vec<Vec<f64>> = vec![Vec::new(); 5];
            for _ in 0..rounds {
                rows[0].push(time(&group, iters, || group.all_reduce(&mut whole[..], ReduceOp::Sum).unwrap()));
                rows[1].push(time(&group, iters, || group.broadcast(&mut whole[..], 0).unwrap()));
                rows[2].push(time(&group, iters, || group.all_gather(&p[..], &mut whole[..]).unwrap()));
                rows[3].push(time(&group, iters, || group.reduce_scatter(&whole[..], &mut p[..], ReduceOp::Sum).unwrap()));
                rows[4].push(time(&group, iters, || group.all_to_all(&whole[..], &mut other[..]).unwrap()));
            }
            if rank == 0 {
                print!("ops {world} ranks {bytes}:");
                for (name, row) in ["all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all"].iter().zip(&mut rows) { let m = median(row); print!("  {name} {m:.1} [{:.1}-{:.1}]", row[0], row[row.len()-1]); }
                println!();
            }
        },
        _ => panic!(),
    }
    group.barrier().unwrap();
    group.shutdown().unwrap();
}
