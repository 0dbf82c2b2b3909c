//! Whether a grant is to be believed: who signed it, for which Pod and node, and when.

use gpufence_grant::{
    annotation::{self, AnnotatedGrant},
    signature::Keyring,
};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{EnforceError, identity::Identity, policy::Policy};

/// Refuses a grant that policy doesn't believe. The keys are read only where there is a signature.
pub fn check(
    grant: &AnnotatedGrant,
    identity: &Identity,
    policy: &Policy,
    now: OffsetDateTime,
) -> Result<(), EnforceError> {
    let keys = match &grant.signature {
        Some(_) => policy.keyring().map_err(|source| EnforceError::Signature { source })?,
        None => Keyring::default(),
    };
    check_signature(grant, &keys, policy, now)?;
    check_addressee(grant, identity, policy)
}

/// A signature has to hold wherever there are keys to hold it against, also where none is required.
fn check_signature(
    grant: &AnnotatedGrant,
    keys: &Keyring,
    policy: &Policy,
    now: OffsetDateTime,
) -> Result<(), EnforceError> {
    let origin = grant.origin;
    // The administrator's own word, in the runtime's arguments, needs no signature.
    if origin == annotation::FIXED {
        return Ok(());
    }
    let Some(signature) = &grant.signature else {
        return if policy.require_signature { Err(EnforceError::Unsigned { origin }) } else { Ok(()) };
    };
    if keys.is_empty() && !policy.require_signature {
        return Ok(());
    }
    keys.verify(&grant.text, signature).map_err(|source| EnforceError::Signature { source })?;
    let missing = |what: &str| Err(EnforceError::Incomplete { origin, what: what.to_owned() });
    let granted = &grant.grant;
    if granted.pod_uid.is_none() {
        return missing("for which Pod it is (podUID)");
    }
    if granted.node.is_none() {
        return missing("for which node it is (node)");
    }
    let Some(issued) = &granted.issued_at else { return missing("when it was written (issuedAt)") };
    let Ok(issued_at) = OffsetDateTime::parse(issued, &Rfc3339) else {
        return missing(&format!("when it was written, and issuedAt \"{issued}\" isn't RFC 3339"));
    };
    check_time(origin, (now - issued_at).whole_seconds(), policy)
}

/// `age` is in seconds; below 0 it is of a time to come.
fn check_time(origin: &'static str, age: i64, policy: &Policy) -> Result<(), EnforceError> {
    let refuse = |what: String| Err(EnforceError::Time { origin, what });
    let bound = |seconds: u64| i64::try_from(seconds).unwrap_or(i64::MAX);
    let (skew, most) = (policy.grant_clock_skew_seconds, policy.grant_max_age_seconds);
    if age < -bound(skew) {
        return refuse(format!(
            "{} s ahead of this node's clock, and {skew} are let pass (grant_clock_skew_seconds); set the clocks right",
            age.unsigned_abs()
        ));
    }
    if most > 0 && age > bound(most).saturating_add(bound(skew)) {
        return refuse(format!(
            "{age} s ago, and {most} are let pass (grant_max_age_seconds); delete the Pod, and let the scheduler grant anew"
        ));
    }
    Ok(())
}

/// A grant for another Pod or another node is a copied one.
fn check_addressee(grant: &AnnotatedGrant, identity: &Identity, policy: &Policy) -> Result<(), EnforceError> {
    let origin = grant.origin;
    let refuse = |what, granted: &str, actual: &str| {
        Err(EnforceError::NotForUs { origin, what, granted: granted.to_owned(), actual: actual.to_owned() })
    };
    if let Some(granted) = &grant.grant.pod_uid {
        match &identity.pod_uid {
            Some(actual) if actual == granted => {}
            Some(actual) => return refuse("Pod", granted, actual),
            None if identity.in_pod => {
                return refuse(
                    "Pod",
                    granted,
                    "a Pod whose UID the engine doesn't pass on; containerd does so from 1.6.11",
                );
            }
            None => return refuse("Pod", granted, "no Pod"),
        }
    }
    match &grant.grant.node {
        Some(granted) if !policy.node.is_empty() && *granted != policy.node => refuse("node", granted, &policy.node),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use gpufence_grant::signing::PrivateKey;
    use serde_json::json;

    use super::*;

    const GPU: &str = "GPU-5f4d0c7e-4b2a-4c7e-9c1e-0d6c2c6f0001";

    fn policy() -> Policy {
        Policy { require_signature: true, node: "n".into(), ..Policy::default() }
    }

    fn text(uid: &str, node: &str, issued_at: &str) -> String {
        json!({
            "version": 1, "podUID": uid, "node": node, "issuedAt": issued_at,
            "containers": {"trainer": [{"gpu": GPU, "memoryMiB": 1}]},
        })
        .to_string()
    }

    fn annotated(text: &str, signature: Option<&str>) -> AnnotatedGrant {
        let both = [(annotation::GRANT, Some(text)), (annotation::GRANT_SIGNATURE, signature)];
        annotation::read(both.into_iter().filter_map(|(key, value)| Some((key, value?)))).unwrap().unwrap()
    }

    fn in_pod(uid: Option<&str>) -> Identity {
        let mut annotations = json!({"io.kubernetes.cri.container-type": "container"});
        if let Some(uid) = uid {
            annotations["io.kubernetes.cri.sandbox-uid"] = json!(uid);
        }
        Identity::of("id", annotations.as_object().unwrap())
    }

    /// What becomes of a grant ten seconds after 2026-01-01.
    fn verdict(grant: &AnnotatedGrant, keys: &Keyring, uid: Option<&str>, policy: &Policy) -> Result<(), String> {
        let now = OffsetDateTime::parse("2026-01-01T00:00:10Z", &Rfc3339).unwrap();
        check_signature(grant, keys, policy, now)
            .and_then(|()| check_addressee(grant, &in_pod(uid), policy))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn who_is_believed() {
        let (key, retired) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
        let keys = Keyring::new([key.public().clone()]);
        let good = text("u", "n", "2026-01-01T00:00:00Z");
        let signed = |text: &str| annotated(text, Some(&key.sign(text)));
        let policy = policy();
        assert_eq!(verdict(&signed(&good), &keys, Some("u"), &policy), Ok(()));
        let limited = Policy { grant_max_age_seconds: 60, ..policy.clone() };
        assert_eq!(verdict(&signed(&good), &keys, Some("u"), &limited), Ok(()));
        let bare = format!(r#"{{"version":1,"containers":{{"a":[{{"gpu":"{GPU}","memoryMiB":1}}]}}}}"#);
        for (name, grant, uid, policy, expected) in [
            ("unsigned", annotated(&good, None), Some("u"), &policy, "isn't signed"),
            (
                "edited by one byte",
                annotated(&good.replace("\"memoryMiB\":1", "\"memoryMiB\":2"), Some(&key.sign(&good))),
                Some("u"),
                &policy,
                "changed after it was signed",
            ),
            ("retired key", annotated(&good, Some(&retired.sign(&good))), Some("u"), &policy, "a retired key"),
            ("no signature at all", annotated(&good, Some("x")), Some("u"), &policy, "not of the form"),
            ("another Pod", signed(&good), Some("v"), &policy, "the grant is for Pod u, but this is v"),
            ("no UID", signed(&good), None, &policy, "containerd does so from 1.6.11"),
            (
                "another node",
                signed(&text("u", "m", "2026-01-01T00:00:00Z")),
                Some("u"),
                &policy,
                "the grant is for node m, but this is n",
            ),
            ("no Pod named", signed(&bare), Some("u"), &policy, "for which Pod it is"),
            ("no time", signed(&text("u", "n", "yesterday")), Some("u"), &policy, "isn't RFC 3339"),
            (
                "of a time to come",
                signed(&text("u", "n", "2026-01-01T00:05:11Z")),
                Some("u"),
                &policy,
                "301 s ahead of this node's clock, and 300 are let pass",
            ),
            (
                "too old",
                signed(&text("u", "n", "2025-12-31T23:54:09Z")),
                Some("u"),
                &limited,
                "361 s ago, and 60 are let pass",
            ),
        ] {
            let error = verdict(&grant, &keys, uid, policy).unwrap_err();
            assert!(error.contains(expected), "{name}: {error}");
        }
        // As far ahead, and as old, as is let pass.
        assert_eq!(verdict(&signed(&text("u", "n", "2026-01-01T00:05:10Z")), &keys, Some("u"), &policy), Ok(()));
        assert_eq!(verdict(&signed(&text("u", "n", "2025-12-31T23:54:10Z")), &keys, Some("u"), &limited), Ok(()));
        assert!(verdict(&signed(&good), &Keyring::default(), Some("u"), &policy).unwrap_err().contains("no key is"));
    }

    #[test]
    fn where_none_is_required() {
        let key = PrivateKey::generate().unwrap();
        let keys = Keyring::new([key.public().clone()]);
        let policy = Policy::default();
        let good = text("u", "n", "2026-01-01T00:00:00Z");
        assert_eq!(verdict(&annotated(&good, None), &keys, Some("u"), &policy), Ok(()));
        // With no key nobody can tell; with one, what is signed has to hold.
        assert_eq!(verdict(&annotated(&good, Some("x")), &Keyring::default(), Some("u"), &policy), Ok(()));
        assert!(verdict(&annotated(&good, Some("x")), &keys, Some("u"), &policy).is_err());
    }

    #[test]
    fn the_administrator_s_own_needs_no_signature() {
        let fixed = annotation::read_fixed("0=1GiB").unwrap();
        assert_eq!(verdict(&fixed, &Keyring::default(), None, &policy()), Ok(()));
    }
}
