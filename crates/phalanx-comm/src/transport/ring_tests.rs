//! Properties of the byte ring.

use super::*;

fn ring(capacity: usize) -> (Arc<Region>, Producer, Consumer) {
    let region = Arc::new(Region::anonymous(ring_bytes(capacity)).unwrap());
    let producer = Producer::new(Arc::clone(&region), 0, capacity);
    let consumer = Consumer::new(Arc::clone(&region), 0, capacity);
    (region, producer, consumer)
}

#[test]
fn full_ring_takes_nothing_empty_ring_gives_nothing() {
    let (_region, mut tx, mut rx) = ring(64);
    let mut out = [0; 100];
    assert_eq!(rx.read(&mut out, || ()), Ok(0));
    assert_eq!(rx.readable(), Ok(false));
    assert_eq!(tx.write(&[7; 100], || ()), Ok(64));
    assert_eq!(tx.writable(), Ok(false));
    assert_eq!(tx.write(&[7; 1], || ()), Ok(0));
    assert_eq!(rx.read(&mut out[..1], || ()), Ok(1));
    assert_eq!(tx.writable(), Ok(true));
    assert_eq!(tx.write(&[8; 5], || ()), Ok(1));
    assert_eq!(rx.read(&mut out, || ()), Ok(64));
    assert_eq!(&out[..63], &[7; 63]);
    assert_eq!(out[63], 8);
}

#[test]
fn bytes_survive_the_wrap_at_every_phase() {
    let (_region, mut tx, mut rx) = ring(64);
    let mut next = 0_u8;
    let mut expected = 0_u8;
    for size in (1..64).cycle().take(1000) {
        let data: Vec<u8> = (0..size).map(|i| next.wrapping_add(i as u8)).collect();
        assert_eq!(tx.write(&data, || ()), Ok(size));
        next = next.wrapping_add(size as u8);
        let mut out = vec![0; size];
        assert_eq!(rx.read(&mut out, || ()), Ok(size));
        for byte in out {
            assert_eq!(byte, expected);
            expected = expected.wrapping_add(1);
        }
    }
}

#[test]
fn large_transfers_are_published_in_pieces() {
    let (_region, mut tx, mut rx) = ring(1 << 20);
    let mut pieces = 0;
    assert_eq!(tx.write(&vec![1; 1 << 20], || pieces += 1), Ok(1 << 20));
    assert_eq!(pieces, (1 << 20) / PIECE_BYTES);
    let mut freed = 0;
    assert_eq!(rx.read(&mut vec![0; 1 << 20], || freed += 1), Ok(1 << 20));
    assert_eq!(freed, (1 << 20) / PIECE_BYTES);
}

#[test]
fn producer_refuses_a_head_beyond_its_tail() {
    let (region, mut tx, _rx) = ring(64);
    assert_eq!(tx.write(&[0; 64], || ()), Ok(64));
    region.u64_at(LINE_BYTES).store(65, Ordering::SeqCst);
    assert!(tx.write(&[0], || ()).is_err());
    assert!(tx.writable().is_err());
}

#[test]
fn producer_refuses_a_head_that_goes_back() {
    let (region, mut tx, mut rx) = ring(64);
    assert_eq!(tx.write(&[0; 64], || ()), Ok(64));
    assert_eq!(rx.read(&mut [0; 64], || ()), Ok(64));
    assert_eq!(tx.write(&[0; 64], || ()), Ok(64));
    region.u64_at(LINE_BYTES).store(3, Ordering::SeqCst);
    let e = tx.write(&[0], || ()).unwrap_err();
    assert_eq!(e.claimed, 3);
    assert!(e.to_string().contains("64 to 128"), "{e}");
}

#[test]
fn consumer_refuses_more_than_the_ring_holds() {
    for lie in [65, u64::MAX, 1 << 40] {
        let (region, _tx, mut rx) = ring(64);
        region.u64_at(0).store(lie, Ordering::SeqCst);
        assert!(rx.read(&mut [0; 128], || ()).is_err(), "{lie}");
        assert!(rx.readable().is_err(), "{lie}");
    }
}

#[test]
fn consumer_refuses_a_tail_that_goes_back() {
    let (region, mut tx, mut rx) = ring(64);
    assert_eq!(tx.write(&[0; 10], || ()), Ok(10));
    assert_eq!(rx.read(&mut [0; 10], || ()), Ok(10));
    region.u64_at(0).store(9, Ordering::SeqCst);
    assert!(rx.readable().is_err());
}

/// Small random generator, so that failures can be repeated.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

#[test]
fn two_threads_random_sizes_keep_order() {
    for (capacity, total) in [(64, 200_000_u32), (256, 400_000), (1 << 17, 8_000_000)] {
        let (_region, mut tx, mut rx) = ring(capacity);
        let byte = |i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut random = Lcg(1);
                let mut sent = 0_u32;
                while sent < total {
                    let want = (1 + random.below(2 * capacity) as u32).min(total - sent);
                    let data: Vec<u8> = (sent..sent + want).map(byte).collect();
                    let mut done = 0;
                    while done < data.len() {
                        let n = tx.write(&data[done..], || ()).unwrap();
                        if n == 0 {
                            std::thread::yield_now();
                        }
                        done += n;
                    }
                    sent += want;
                }
            });
            let mut random = Lcg(2);
            let mut got = 0_u32;
            let mut out = vec![0; 2 * capacity];
            while got < total {
                let want = 1 + random.below(2 * capacity);
                let n = rx.read(&mut out[..want], || ()).unwrap();
                if n == 0 {
                    std::thread::yield_now();
                }
                for &b in &out[..n] {
                    assert_eq!(b, byte(got), "byte {got}, capacity {capacity}");
                    got += 1;
                }
            }
        });
    }
}
