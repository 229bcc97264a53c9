//! Validation of a request for a model, before anything is fetched.

use hearth_crds::{hub_store_key, store_key};
use hearth_fetch::{Credentials, FetchError, Key, Source};
use hearth_transport::v1::{self, ModelRequest};
use ipnet::IpNet;
use tonic::Status;

/// Returns key and source of a request; no source if it has neither a URL nor a repository. The key must follow from everything needed to open
/// the model: knowing only its checksum does not give access to a stored model.
pub(super) fn checked(request: &ModelRequest) -> Result<(Key, Option<Source>), Status> {
    let key = parsed(&request.key)?;
    if let Some(hub) = &request.hub {
        return Ok((key.clone(), Some(repository(request, hub, key)?)));
    }
    if request.url.is_empty() {
        return Ok((key, None));
    }
    let expected = store_key(&request.url, &request.sha256, &request.holder);
    if key.as_str() != expected {
        return Err(Status::invalid_argument(format!(
            "key is {key}, and that of the URL, sha256 {} and holder {:?} is {expected}",
            request.sha256, request.holder
        )));
    }
    let source = Source::new(&request.url, &request.sha256)
        .map_err(|error| Status::invalid_argument(error.to_string()))?
        .kept_as(key.clone());
    Ok((
        key,
        Some(match credentials(request.credentials.as_ref())? {
            Some(credentials) => source.opened_by(credentials),
            None => source,
        }),
    ))
}

/// Returns the source of a request for a hub's repository.
fn repository(request: &ModelRequest, hub: &v1::HubRepository, key: Key) -> Result<Source, Status> {
    if !request.url.is_empty() {
        return Err(Status::invalid_argument(
            "both a URL and a repository of a hub were given",
        ));
    }
    let expected = hub_store_key(&hub.repo, &hub.revision, &request.holder);
    if key.as_str() != expected {
        return Err(Status::invalid_argument(format!(
            "key is {key}, and that of {} at {:?} and holder {:?} is {expected}",
            hub.repo, hub.revision, request.holder
        )));
    }
    let refused = |error: FetchError| Status::invalid_argument(error.to_string());
    let mut source = Source::of_hub(&hub.endpoint, &hub.repo, Some(&hub.revision))
        .map_err(refused)?
        .kept_as(key);
    if !hub.commit.is_empty() {
        source = source.at_commit(&hub.commit).map_err(refused)?;
    }
    Ok(match credentials(request.credentials.as_ref())? {
        Some(credentials) => source.opened_by(credentials),
        None => source,
    })
}

fn credentials(given: Option<&v1::Credentials>) -> Result<Option<Credentials>, Status> {
    let Some(v1::Credentials {
        username,
        password,
        token,
    }) = given
    else {
        return Ok(None);
    };
    match (username.is_empty(), token.is_empty()) {
        (false, true) => Ok(Some(Credentials::Basic {
            username: username.clone(),
            password: password.clone(),
        })),
        (true, false) => Ok(Some(Credentials::Bearer {
            token: token.clone(),
        })),
        _ => Err(Status::invalid_argument(
            "credentials are a token, or a username with its password",
        )),
    }
}

/// Parses address ranges in CIDR notation.
pub(super) fn ranges(texts: &[String]) -> Result<Vec<IpNet>, Status> {
    let range = |text: &String| {
        text.parse().map_err(|_| {
            Status::invalid_argument(format!(
                "{text:?} is not an address range such as 10.42.0.0/16"
            ))
        })
    };
    texts.iter().map(range).collect()
}

/// Parses a key.
pub(super) fn parsed(text: &str) -> Result<Key, Status> {
    Key::parse(text).ok_or_else(|| {
        Status::invalid_argument(format!(
            "key is {text:?}: it must have 32 lower-case hexadecimal digits"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_checked_before_anything_is_fetched() {
        let sha256 = "ab".repeat(32);
        let nas = "http://nas/m.tar";
        let request = |key: &str, url: &str| ModelRequest {
            key: key.to_owned(),
            url: url.to_owned(),
            sha256: sha256.clone(),
            ..ModelRequest::default()
        };
        let key_of = |url: &str, holder: &str| store_key(url, &sha256, holder);
        let public = key_of(nas, "");
        let (key, source) = checked(&request(&public, nas)).unwrap();
        assert_eq!((key.as_str(), &source.unwrap().key()), (&*public, &key));
        assert!(checked(&request(&public, "")).unwrap().1.is_none());
        let file = "file:///etc/passwd";
        for (key, url) in [
            ("../../etc", nas),
            // Only the digest, and the key of another holder.
            (&sha256[..32], nas),
            (&key_of(nas, "other/secret"), nas),
            (&key_of("http://other/m.tar", ""), nas),
            (&key_of(file, ""), file),
        ] {
            let status = checked(&request(key, url)).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
        }
    }

    #[test]
    fn a_repository_is_checked_with_who_may_have_it() {
        let request = |key: &str, hub: (&str, &str, &str), commit: &str| {
            let [endpoint, repo, revision] = [hub.0, hub.1, hub.2].map(str::to_owned);
            ModelRequest {
                key: key.to_owned(),
                holder: "one/hub".to_owned(),
                hub: Some(v1::HubRepository {
                    endpoint,
                    repo,
                    revision,
                    commit: commit.to_owned(),
                }),
                ..ModelRequest::default()
            }
        };
        let hub = ("https://hub.lan", "a/b", "main");
        let key = hub_store_key("a/b", "main", "one/hub");
        let (found, source) = checked(&request(&key, hub, "")).unwrap();
        assert_eq!(
            (found.as_str(), source.unwrap().key()),
            (&*key, found.clone())
        );
        assert!(checked(&request(&key, hub, &"c".repeat(40))).is_ok());
        let other = hub_store_key("a/b", "main", "");
        let odd = hub_store_key("../b", "main", "one/hub");
        for (key, hub, commit) in [
            (&other, hub, ""),
            (&key, ("https://hub.lan", "a/b", "v2"), ""),
            (&key, ("ftp://hub.lan", "a/b", "main"), ""),
            (&odd, ("https://hub.lan", "../b", "main"), ""),
            (&key, hub, "main"),
        ] {
            let status = checked(&request(key, hub, commit)).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
        }
        let both = ModelRequest {
            url: "http://nas/m.tar".to_owned(),
            ..request(&key, hub, "")
        };
        assert!(checked(&both).is_err());
    }

    #[test]
    fn credentials_are_a_token_or_a_user() {
        let given = |username: &str, password: &str, token: &str| {
            let [username, password, token] = [username, password, token].map(str::to_owned);
            credentials(Some(&v1::Credentials {
                username,
                password,
                token,
            }))
        };
        assert!(credentials(None).unwrap().is_none());
        assert!(matches!(
            given("ann", "pw", ""),
            Ok(Some(Credentials::Basic { .. }))
        ));
        assert!(matches!(
            given("ann", "", ""),
            Ok(Some(Credentials::Basic { .. }))
        ));
        assert!(matches!(
            given("", "", "t"),
            Ok(Some(Credentials::Bearer { .. }))
        ));
        for (username, token) in [("ann", "t"), ("", "")] {
            assert!(given(username, "", token).is_err());
        }
        assert!(ranges(&["10.42.0.0/16".to_owned(), "fd42::/48".to_owned()]).is_ok());
        assert!(ranges(&["10.42.0.0".to_owned()]).is_err());
    }
}
