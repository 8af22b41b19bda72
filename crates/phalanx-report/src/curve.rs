//! Curves of any length in a bounded number of points.

use serde::Serialize;

/// Most points of a curve, its first and last not counted.
pub const MAX_POINTS: usize = 2000;

/// At most `most` of `0..count`, evenly spread, the first and the last among them.
pub fn spread(count: usize, most: usize) -> Vec<usize> {
    if count <= most.max(1) {
        return (0..count).collect();
    }
    let last = most.max(2) - 1;
    (0..=last).map(|i| i * (count - 1) / last).collect()
}

/// A point and its number.
type Point = (usize, f64, f64);

/// A curve as the page gets it.
#[derive(Debug, Default, Serialize)]
pub struct Points {
    /// Steps.
    pub x: Vec<f64>,
    /// Values.
    pub y: Vec<f64>,
    /// Points in the log.
    pub total: usize,
}

/// Points in the order of a log. A long curve is kept as buckets of equally many points, and of
/// each its least and greatest.
#[derive(Debug)]
pub struct Curve {
    /// Most points.
    most: usize,
    /// Points of a bucket.
    width: usize,
    buckets: Vec<(Point, Point)>,
    count: usize,
    ends: Option<(Point, Point)>,
}

impl Default for Curve {
    fn default() -> Self {
        Curve::new(MAX_POINTS)
    }
}

impl Curve {
    /// A curve of at most `most` points, its first and last not counted.
    pub fn new(most: usize) -> Curve {
        Curve {
            most,
            width: 1,
            buckets: Vec::new(),
            count: 0,
            ends: None,
        }
    }

    /// Adds the next point.
    pub fn add(&mut self, x: f64, y: f64) {
        let point = (self.count, x, y);
        self.ends = Some((self.ends.map_or(point, |ends| ends.0), point));
        if self.count.is_multiple_of(self.width) {
            self.buckets.push((point, point));
        } else if let Some(last) = self.buckets.last_mut() {
            *last = joined(*last, (point, point));
        }
        self.count += 1;
        let each = if self.width == 1 { 1 } else { 2 };
        if self.buckets.len() * each > self.most {
            let pairs = self.buckets.chunks(2);
            let pairs = pairs.map(|pair| joined(pair[0], pair[pair.len() - 1]));
            self.buckets = pairs.collect();
            self.width *= 2;
        }
    }

    /// Points that were added.
    pub fn total(&self) -> usize {
        self.count
    }

    /// The points to draw: all, or ends and extremes.
    pub fn points(&self) -> Points {
        let both = self.buckets.iter().chain(&self.ends);
        let mut all: Vec<Point> = both.flat_map(|(low, high)| [*low, *high]).collect();
        all.sort_by_key(|point| point.0);
        all.dedup_by_key(|point| point.0);
        Points {
            x: all.iter().map(|point| point.1).collect(),
            y: all.iter().map(|point| point.2).collect(),
            total: self.count,
        }
    }
}

/// The bucket of two buckets' points.
fn joined(a: (Point, Point), b: (Point, Point)) -> (Point, Point) {
    let low = if b.0.2 < a.0.2 { b.0 } else { a.0 };
    let high = if b.1.2 > a.1.2 { b.1 } else { a.1 };
    (low, high)
}
