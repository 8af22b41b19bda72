//! The collectives, asked for in every way there is.

use phalanx_comm::{Algorithm, Bucket, Call, ProcessGroup, ReduceOp};

use crate::common::{Value, assert_same_bits};

/// How it is asked for.
#[derive(Clone, Copy, Debug)]
pub enum Asked {
    Slices,
    OwnBuckets,
    GroupBuckets,
}

impl Asked {
    pub fn of(number: usize) -> Asked {
        [Asked::Slices, Asked::OwnBuckets, Asked::GroupBuckets][number % 3]
    }

    fn bucket<T: Value>(self, group: &ProcessGroup, data: &[T]) -> Bucket<T> {
        match self {
            Asked::GroupBuckets => {
                let mut bucket = group.bucket(data.len());
                bucket.copy_from_slice(data);
                bucket
            }
            _ => Bucket::from_slice(data),
        }
    }
}

pub fn all_reduce<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: &[T],
    op: ReduceOp,
    algorithm: Algorithm,
) -> Vec<T> {
    let call = Call {
        algorithm,
        ..Call::default()
    };
    if let Asked::Slices = asked {
        let mut data = data.to_vec();
        group.with_call(call).all_reduce(&mut data, op).unwrap();
        return data;
    }
    let work = group.all_reduce_async(asked.bucket(group, data), op, call);
    work.wait().unwrap().to_vec()
}

pub fn reduce<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: &[T],
    op: ReduceOp,
    root: usize,
) -> Vec<T> {
    if let Asked::Slices = asked {
        let mut data = data.to_vec();
        group.reduce(&mut data, op, root).unwrap();
        return data;
    }
    let work = group.reduce_async(asked.bucket(group, data), op, root, Call::default());
    work.wait().unwrap().to_vec()
}

pub fn reduce_scatter<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: &[T],
    op: ReduceOp,
) -> Vec<T> {
    let mut part = vec![T::default(); data.len() / group.world_size()];
    if let Asked::Slices = asked {
        group.reduce_scatter(data, &mut part, op).unwrap();
        return part;
    }
    let (input, output) = (asked.bucket(group, data), asked.bucket(group, &part));
    let work = group.reduce_scatter_async(input, output, op, Call::default());
    let (input, output) = work.wait().unwrap();
    assert_same_bits(&input, data, || format!("input of {op}"));
    output.to_vec()
}

pub fn broadcast<T: Value>(group: &ProcessGroup, asked: Asked, data: &[T], root: usize) -> Vec<T> {
    if let Asked::Slices = asked {
        let mut data = data.to_vec();
        group.broadcast(&mut data, root).unwrap();
        return data;
    }
    let work = group.broadcast_async(asked.bucket(group, data), root, Call::default());
    work.wait().unwrap().to_vec()
}

pub fn all_gather<T: Value>(group: &ProcessGroup, asked: Asked, data: &[T]) -> Vec<T> {
    let mut all = vec![T::default(); data.len() * group.world_size()];
    if let Asked::Slices = asked {
        group.all_gather(data, &mut all).unwrap();
        return all;
    }
    let (input, output) = (asked.bucket(group, data), asked.bucket(group, &all));
    let work = group.all_gather_async(input, output, Call::default());
    work.wait().unwrap().1.to_vec()
}

pub fn gather<T: Value>(group: &ProcessGroup, asked: Asked, data: &[T], root: usize) -> Vec<T> {
    let is_root = group.rank() == root;
    let mut all = vec![
        T::default();
        if is_root {
            data.len() * group.world_size()
        } else {
            0
        }
    ];
    if let Asked::Slices = asked {
        let output = is_root.then_some(&mut all[..]);
        group.gather(data, output, root).unwrap();
        return all;
    }
    let output = is_root.then(|| asked.bucket(group, &all));
    let work = group.gather_async(asked.bucket(group, data), output, root, Call::default());
    let (_, output) = work.wait().unwrap();
    output.map(|output| output.to_vec()).unwrap_or_default()
}

pub fn scatter<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: Option<&[T]>,
    count: usize,
    root: usize,
) -> Vec<T> {
    let mut part = vec![T::default(); count];
    if let Asked::Slices = asked {
        group.scatter(data, &mut part, root).unwrap();
        return part;
    }
    let input = data.map(|data| asked.bucket(group, data));
    let work = group.scatter_async(input, asked.bucket(group, &part), root, Call::default());
    work.wait().unwrap().1.to_vec()
}

pub fn all_to_all<T: Value>(group: &ProcessGroup, asked: Asked, data: &[T]) -> Vec<T> {
    let mut all = vec![T::default(); data.len()];
    if let Asked::Slices = asked {
        group.all_to_all(data, &mut all).unwrap();
        return all;
    }
    let (input, output) = (asked.bucket(group, data), asked.bucket(group, &all));
    let work = group.all_to_all_async(input, output, Call::default());
    work.wait().unwrap().1.to_vec()
}

/// Receives from `Ok(rank)`, or sends to `Err(rank)`; what was transferred.
pub fn message<T: Value>(
    group: &ProcessGroup,
    asked: Asked,
    data: &[T],
    peer: Result<usize, usize>,
) -> Vec<T> {
    let mut got = vec![T::default(); data.len()];
    let work = match (asked, peer) {
        (Asked::Slices, Ok(from)) => {
            group.recv(&mut got, from).unwrap();
            return got;
        }
        (Asked::Slices, Err(to)) => {
            group.send(data, to).unwrap();
            return data.to_vec();
        }
        (_, Ok(from)) => {
            let work = group.recv_async(asked.bucket(group, &got), from, Call::default());
            let (got, sender) = work.wait().unwrap();
            assert_eq!(sender, from);
            return got.to_vec();
        }
        (_, Err(to)) => group.send_async(asked.bucket(group, data), to, Call::default()),
    };
    work.wait().unwrap().to_vec()
}
