//! The log that an engine names with `--log` and reads when a call has failed, in runc's two forms.

use std::{fs::OpenOptions, io::Write};

use serde_json::json;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::arguments::Call;

/// Adds an error. That it can't be written is no further error: it is on stderr too.
pub fn error(call: &Call, message: &str) {
    let Some(path) = &call.log else { return };
    let time = OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default();
    let line = if call.log_json {
        json!({"level": "error", "msg": message, "time": time}).to_string()
    } else {
        format!("time=\"{time}\" level=error msg={}", json!(message))
    };
    let file = OpenOptions::new().create(true).append(true).open(path);
    let _ = file.and_then(|mut file| writeln!(file, "{line}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        for log_json in [true, false] {
            error(&Call { log: Some(log.clone()), log_json, ..Call::default() }, "a \"fault\"");
        }
        let text = std::fs::read_to_string(log).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with(r#"{"level":"error","msg":"a \"fault\"","time":"#), "{text}");
        assert!(lines[1].contains(r#"level=error msg="a \"fault\"""#), "{text}");
    }
}
