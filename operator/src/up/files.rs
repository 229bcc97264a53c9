//! Files and values passed to `hearth up` for the gateway and the workers, besides the deployment.

use anyhow::{anyhow, bail};
use hearth_transport::{Tls, TlsError, TlsFiles, TlsNames, origin, tls};

use super::{UpArgs, ask};

/// Checks the files and values that the gateway and the workers would reject, before anything is measured.
///
/// # Errors
/// An unusable file or value: its flag, its value and the remedy.
pub(super) fn check(args: &UpArgs) -> anyhow::Result<()> {
    if let Some(keys) = &args.api_keys
        && !keys.is_file()
    {
        bail!(
            "--api-keys is {}, which is not a file\n  write one key a line into it",
            keys.display()
        );
    }
    if let Some(keys) = &args.api_keys
        && ask::first_key(keys).is_none()
    {
        bail!(
            "--api-keys is {}, which holds no key\n  write one key a line; lines that begin with # are comments",
            keys.display()
        );
    }
    for (flag, what, file) in [
        ("--https-cert", "certificate", &args.https_cert),
        ("--https-key", "private key", &args.https_key),
    ] {
        if let Some(file) = file
            && !file.is_file()
        {
            bail!(
                "{flag} is {}, which is not a file\n  name a PEM file with the {what} of the endpoint",
                file.display()
            );
        }
    }
    for origin in &args.cors_origins {
        origin::check(origin)
            .map_err(|remedy| anyhow!("--cors-origin is {origin:?}\n  {remedy}"))?;
    }
    if let (Some(cert), Some(key)) = (&args.https_cert, &args.https_key) {
        tls::check_pair(cert, key).map_err(|error| {
            unusable(&error, &|what| match what {
                "key" => ("--https-key".to_owned(), "private key of the endpoint"),
                _ => ("--https-cert".to_owned(), "certificate of the endpoint"),
            })
        })?;
    }
    let Some(directory) = &args.tls_dir else {
        return Ok(());
    };
    for name in ["tls.crt", "tls.key", "ca.crt"] {
        if !directory.join(name).is_file() {
            bail!(
                "--tls-dir is {}, and {name} is not in it\n  mutual TLS needs tls.crt, tls.key and ca.crt",
                directory.display()
            );
        }
    }
    let files = TlsFiles {
        cert: directory.join("tls.crt"),
        key: directory.join("tls.key"),
        ca: directory.join("ca.crt"),
        names: TlsNames::default(),
    };
    Tls::read(&files).map(drop).map_err(|error| {
        let inside = |name, holds| (format!("{name} of --tls-dir"), holds);
        unusable(&error, &|what| match what {
            "key" => inside("tls.key", "private key of the processes"),
            "authority" => inside("ca.crt", "certificates of the authorities"),
            _ => inside("tls.crt", "certificate of the processes"),
        })
    })
}

/// Error for an unusable PEM file, naming its flag. `flag` returns the flag and the expected contents of its file.
fn unusable(error: &TlsError, flag: &dyn Fn(&str) -> (String, &'static str)) -> anyhow::Error {
    match error {
        TlsError::Read { what, path, reason } => {
            let (flag, holds) = flag(what);
            let path = path.display();
            anyhow!(
                "{flag} is {path}, which cannot be read: {reason}\n  name a PEM file with the {holds}"
            )
        }
        TlsError::Content { what, path, detail } => {
            let (flag, holds) = flag(what);
            let path = path.display();
            anyhow!("{flag} is {path}: {detail}\n  name a PEM file with the {holds}")
        }
        TlsError::Pair { cert, key, detail } => {
            let (key_flag, (cert_flag, _)) = (flag("key").0, flag("certificate"));
            let (cert, key) = (cert.display(), key.display());
            anyhow!(
                "{key_flag} is {key}, which does not belong to {cert_flag} {cert}: {detail}\n  name the private key that the certificate was made for"
            )
        }
        error => anyhow!("{error}"),
    }
}
