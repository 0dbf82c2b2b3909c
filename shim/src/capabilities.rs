//! `process.capabilities`: the dropped ones leave all five sets, the bounding set too, so that no setuid program brings
//! one back.

use serde_json::{Value, json};

use crate::EnforceError;

/// The sets of the OCI runtime specification.
const SETS: [&str; 5] = ["bounding", "effective", "inheritable", "permitted", "ambient"];

/// Takes `dropped` from a process. `process` is `process` of a spec, or the process of an exec.
pub fn drop(process: &mut Value, dropped: &[String]) -> Result<(), EnforceError> {
    let Some(capabilities) = process.get_mut("capabilities").filter(|value| !value.is_null()) else { return Ok(()) };
    let capabilities = capabilities
        .as_object_mut()
        .ok_or_else(|| EnforceError::Shape("process.capabilities is not an object".into()))?;
    for set in SETS {
        let Some(list) = capabilities.get_mut(set).filter(|value| !value.is_null()) else { continue };
        let list = list
            .as_array_mut()
            .ok_or_else(|| EnforceError::Shape(format!("process.capabilities.{set} is not a list")))?;
        list.retain(|name| {
            // runc takes names in any case, and without their CAP_ in some forks; so must we.
            let name = name.as_str().unwrap_or_default().to_ascii_uppercase();
            let name = if name.starts_with("CAP_") { name } else { format!("CAP_{name}") };
            !dropped.contains(&name)
        });
    }
    Ok(())
}

/// Forces `no_new_privs`.
pub fn forbid_new_privileges(process: &mut Value) {
    if let Some(process) = process.as_object_mut() {
        process.insert("noNewPrivileges".into(), json!(true));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_all_five_sets_and_keeps_unknown_names() {
        let all = json!(["CAP_CHOWN", "CAP_SYS_ADMIN", "cap_sys_admin", "SYS_ADMIN", "CAP_OF_NEXT_YEAR"]);
        let mut process = json!({"capabilities": {"bounding": all, "effective": all, "inheritable": all, "permitted": all, "ambient": all}});
        drop(&mut process, &["CAP_SYS_ADMIN".into()]).unwrap();
        for set in SETS {
            assert_eq!(process["capabilities"][set], json!(["CAP_CHOWN", "CAP_OF_NEXT_YEAR"]), "{set}");
        }
        drop(&mut json!({}), &["CAP_SYS_ADMIN".into()]).unwrap();
        assert!(drop(&mut json!({"capabilities": []}), &[]).is_err());
        assert!(drop(&mut json!({"capabilities": {"ambient": 1}}), &[]).is_err());
    }
}
