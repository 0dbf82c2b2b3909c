//! Figures that benchmarks report.

use std::time::Duration;

/// The middle one; of none, 0.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// The same of times, in milliseconds.
pub fn median_milliseconds(times: &[Duration]) -> f64 {
    median(&times.iter().map(|time| time.as_secs_f64() * 1000.0).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!(median(&[]).abs() < f64::EPSILON);
        assert!((median_milliseconds(&[Duration::from_millis(5)]) - 5.0).abs() < 1e-9);
    }
}
