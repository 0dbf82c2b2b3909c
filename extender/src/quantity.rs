//! Kubernetes' quantities, as far as extended resources have them: whole numbers that aren't negative.

/// What a quantity's suffix multiplies by, as a power of ten or of two.
fn suffix(text: &str) -> Option<(i32, u32)> {
    Some(match text {
        "" => (0, 0),
        "n" => (-9, 0),
        "u" => (-6, 0),
        "m" => (-3, 0),
        "k" => (3, 0),
        "M" => (6, 0),
        "G" => (9, 0),
        "T" => (12, 0),
        "P" => (15, 0),
        "E" => (18, 0),
        "Ki" => (0, 10),
        "Mi" => (0, 20),
        "Gi" => (0, 30),
        "Ti" => (0, 40),
        "Pi" => (0, 50),
        "Ei" => (0, 60),
        _ => {
            let exponent = text.strip_prefix(['e', 'E'])?;
            let exponent: i32 = exponent.parse().ok()?;
            if !(-20..=20).contains(&exponent) {
                return None;
            }
            (exponent, 0)
        }
    })
}

/// Reads a quantity such as `8`, `8k`, `2Ki`, `1e3` or `2000m`.
///
/// # Errors
/// In words: it isn't a quantity, it is negative, or it isn't whole. Source: `resource.Quantity` of apimachinery, with
/// "only integers" as extended resources have it.
pub fn whole(text: &str) -> Result<u64, &'static str> {
    const NOT_ONE: &str = "is not a quantity";
    let unsigned = text.strip_prefix('+').unwrap_or(text);
    if unsigned.starts_with('-') {
        return Err("is negative");
    }
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, rest) = unsigned.split_at(end);
    let (integer, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (integer.is_empty() && fraction.is_empty()) || fraction.contains('.') || number.len() > 30 {
        return Err(NOT_ONE);
    }
    let fraction = fraction.trim_end_matches('0');
    let (ten, two) = suffix(rest).ok_or(NOT_ONE)?;
    let digits: u128 = format!("0{integer}{fraction}").parse().map_err(|_| NOT_ONE)?;
    let ten = ten - i32::try_from(fraction.len()).map_err(|_| NOT_ONE)?;
    let too_large = "is too large";
    let mut value = digits.checked_mul(1 << two).ok_or(too_large)?;
    let power = 10_u128.checked_pow(ten.unsigned_abs()).ok_or(too_large)?;
    if ten >= 0 {
        value = value.checked_mul(power).ok_or(too_large)?;
    } else if value.is_multiple_of(power) {
        value /= power;
    } else {
        return Err("is not a whole number");
    }
    u64::try_from(value).map_err(|_| too_large)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities() {
        for (text, expected) in [
            ("0", Ok(0)),
            ("8", Ok(8)),
            ("+8", Ok(8)),
            ("8k", Ok(8000)),
            ("2Ki", Ok(2048)),
            ("2000m", Ok(2)),
            ("1.5k", Ok(1500)),
            ("0.5Ki", Ok(512)),
            ("8.0", Ok(8)),
            ("1e3", Ok(1000)),
            ("1E3", Ok(1000)),
            ("1E", Ok(1_000_000_000_000_000_000)),
            ("1.5", Err("is not a whole number")),
            ("1500m", Err("is not a whole number")),
            ("-1", Err("is negative")),
            ("", Err("is not a quantity")),
            (".", Err("is not a quantity")),
            ("8GiB", Err("is not a quantity")),
            ("1e99", Err("is not a quantity")),
            ("99999999999999999999999999999999", Err("is not a quantity")),
            ("99E", Err("is too large")),
            ("1.2.3", Err("is not a quantity")),
        ] {
            assert_eq!(whole(text), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in r"[-+]?[0-9.]{0,40}[a-zA-Z0-9+-]{0,4}") {
            let _ = whole(&text);
        }

        #[test]
        fn whole_numbers_are_themselves(number: u64) {
            prop_assert_eq!(whole(&number.to_string()), Ok(number));
        }
    }
}
