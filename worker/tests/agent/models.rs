//! Fetching and removing models.

use super::*;

#[tokio::test]
async fn a_model_is_fetched_in_the_background_and_told_with_its_facts() {
    let fixture = Fixture::new();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    server.pace(Duration::from_millis(1));
    let wanted = request(&server, &sha256(&archive));

    // Only queried, not fetched.
    let look = ModelRequest {
        url: String::new(),
        ..wanted.clone()
    };
    let absent = model(&fixture.operator, &look).await;
    assert_eq!(absent.state(), ModelState::Absent);
    assert!(server.seen().is_empty());

    let answers = settled(&fixture.operator, &wanted).await;
    let half = answers
        .iter()
        .find(|answer| answer.bytes > 0)
        .expect("progress");
    assert_eq!(half.state(), ModelState::Fetching);
    assert_eq!(half.total_bytes, archive.len() as u64);
    assert!(answers.iter().any(|answer| answer.bytes_per_second > 0));
    let ready = answers.last().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    let facts: ModelFacts = serde_json::from_str(&ready.facts_json).unwrap();
    assert!(
        facts.layers > 0 && facts.bytes.total() > 1 << 20,
        "{facts:?}"
    );
    assert!(ready.bytes > facts.bytes.total());
    assert!(fixture.has(&wanted));

    // Requested again by a second operator, and from the next agent: fetched only once.
    assert_eq!(
        model(&fixture.operator, &wanted).await.state(),
        ModelState::Ready
    );
    assert_eq!(
        model(&fixture.operator, &look).await.state(),
        ModelState::Ready
    );
    let fixture = fixture.restarted();
    assert_eq!(
        settled(&fixture.operator, &look)
            .await
            .last()
            .unwrap()
            .facts_json,
        ready.facts_json
    );
    assert_eq!(server.seen().len(), 1);

    // Its disk was replaced: fetched again.
    fs::remove_dir_all(fixture.cache.path().join("models")).unwrap();
    assert_eq!(
        model(&fixture.operator, &look).await.state(),
        ModelState::Absent
    );
    let again = settled(&fixture.operator, &wanted).await;
    assert_eq!(again.last().unwrap().state(), ModelState::Ready);
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn what_failed_is_told_and_tried_again_later() {
    let fixture = Fixture::impatient();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::Status(404, Vec::new())]);
    let wanted = request(&server, &sha256(&archive));
    let began = Instant::now();
    let failed = settled(&fixture.operator, &wanted).await.pop().unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    // The server is not publicly reachable: its answer appears only in the agent's log.
    let told = failed
        .message
        .replace(&server.url(), "")
        .replace(&wanted.sha256, "");
    assert!(!told.contains("404"), "{told}");
    assert!(failed.message.contains(&server.url()) && failed.message.contains("\n  check"));
    assert!(failed.message.contains("log of this node's agent"));
    // Immediately afterwards: the same message, and the server is not contacted.
    assert_eq!(model(&fixture.operator, &wanted).await, failed);
    assert_eq!(server.seen().len(), 1);
    until("it is tried again", async || {
        model(&fixture.operator, &wanted).await.state() != ModelState::Failed
    })
    .await;
    // Reported after three seconds, and left alone for four times as long.
    assert!(began.elapsed() >= Duration::from_secs(15));
    assert_eq!(
        settled(&fixture.operator, &wanted)
            .await
            .pop()
            .unwrap()
            .state(),
        ModelState::Ready
    );

    // If the file is not the requested one, the failure names the requested checksum, and is not retried at once.
    let wrong = request(&server, &sha256(b"something else"));
    let failed = settled(&fixture.operator, &wrong).await.pop().unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    assert!(failed.message.contains(&wrong.sha256), "{}", failed.message);
    assert!(
        !failed.message.contains(&wanted.sha256),
        "{}",
        failed.message
    );
    // A corrected URL is tried at once.
    let other = FileServer::start(&b"something else"[..]).await;
    let right = request(&other, &wrong.sha256);
    let failed = settled(&fixture.operator, &right).await.pop().unwrap();
    assert!(
        failed.message.contains("not an archive"),
        "{}",
        failed.message
    );

    // A model that cannot be served is not ready.
    let bare = server::model_tar(1000);
    let third = FileServer::start(bare.clone()).await;
    let failed = settled(&fixture.operator, &request(&third, &sha256(&bare)))
        .await
        .pop()
        .unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    assert!(failed.message.contains("config.json"), "{}", failed.message);
}

#[tokio::test]
async fn an_agent_knows_what_those_before_it_tried() {
    let fixture = Fixture::new();
    let archive = b"no archive at all".to_vec();
    let server = FileServer::start(archive.clone()).await;
    let wanted = request(&server, &sha256(&archive));
    let failed = settled(&fixture.operator, &wanted).await.pop().unwrap();
    assert!(
        failed.message.contains("not an archive"),
        "{}",
        failed.message
    );
    let asked = server.seen().len();

    // A failure that costs a download to detect is remembered across agents.
    let fixture = fixture.restarted();
    assert_eq!(model(&fixture.operator, &wanted).await, failed);
    assert_eq!(server.seen().len(), asked);

    // Agents that ended while unpacking a model: one may have been replaced, but not two.
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    let wanted = request(&server, &sha256(&archive));
    let note = fixture
        .cache
        .path()
        .join(format!("partial/{}.tries", wanted.key));
    let in_an_hour = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs()
        + 3600;
    let lost = |times: u32| {
        let tries = serde_json::json!({"lost": times, "why": "it ended", "again_at_s": in_an_hour});
        fs::write(&note, tries.to_string()).unwrap();
    };
    lost(2);
    let failed = model(&fixture.operator, &wanted).await;
    assert_eq!(failed.state(), ModelState::Failed);
    assert_eq!(failed.message, "it ended");
    assert!(server.seen().is_empty());
    let fixture = fixture.restarted();
    lost(1);
    let ready = settled(&fixture.operator, &wanted).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    assert!(!note.exists(), "a model that is ready has nothing to tell");
}

/// A download of hours that broke off near its end resumes there, so its wait need not be as long.
#[tokio::test]
async fn what_is_gone_on_with_does_not_wait_for_as_long_as_it_took() {
    let fixture = Fixture::in_cache(Authority::new(), TempDir::new().unwrap(), 1);
    let archive = demo_tar();
    let pieces = u32::try_from(archive.len().div_ceil(8 << 10)).unwrap();
    let pace = Duration::from_secs(6) / pieces;
    let waits_s = async |wanted: &ModelRequest| {
        let failed = settled(&fixture.operator, wanted).await.pop().unwrap();
        assert_eq!(failed.state(), ModelState::Failed);
        let note = format!("partial/{}.tries", wanted.key);
        let note = fixture.cache.path().join(note);
        let tries: Value = serde_json::from_slice(&fs::read(&note).unwrap()).unwrap();
        let written = fs::metadata(&note).unwrap().modified().unwrap();
        let written = written.duration_since(std::time::UNIX_EPOCH).unwrap();
        tries["again_at_s"]
            .as_u64()
            .unwrap()
            .saturating_sub(written.as_secs())
    };
    let server = FileServer::start(archive.clone()).await;
    server.pace(pace);
    let off = std::iter::repeat_n(Fault::Status(503, Vec::new()), 99);
    server.faults([Fault::CutAfter(archive.len() - 1)]);
    server.faults(off);
    let waits = waits_s(&request(&server, &sha256(&archive))).await;
    assert!(waits <= 5, "{waits} s");
    // A file other than the requested one is downloaded from the start again.
    let server = FileServer::start(archive).await;
    server.pace(pace);
    let waits = waits_s(&request(&server, &sha256(b"something else"))).await;
    assert!(waits >= 10, "{waits} s");
}

#[tokio::test]
async fn a_secret_that_was_put_right_does_not_wait_for_what_another_agent_tried() {
    let fixture = Fixture::impatient();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    server.open_by("Bearer t0ken");
    let by = |token: &str| held(&server, &archive, "one/nas", Some(token));
    let (wrong, right) = (by("t0kem"), by("t0ken"));
    let failed = settled(&fixture.operator, &wrong).await.pop().unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    let asked = server.seen().len();
    let path = fixture
        .cache
        .path()
        .join(format!("partial/{}.tries", wrong.key));
    let note = fs::read_to_string(&path).unwrap();
    assert!(!note.contains("t0kem"), "{note}");
    // However long the next agent takes to start.
    let mut tries: Value = serde_json::from_str(&note).unwrap();
    tries["again_at_s"] = (tries["again_at_s"].as_u64().unwrap() + 3600).into();
    fs::write(&path, tries.to_string()).unwrap();
    let fixture = fixture.restarted();
    assert_eq!(model(&fixture.operator, &wrong).await, failed);
    assert_eq!(server.seen().len(), asked);
    let ready = settled(&fixture.operator, &right).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
}

#[tokio::test]
async fn a_file_of_nothing_is_not_read_into_memory() {
    let fixture = Fixture::new();
    let long = vec![b' '; 17 << 20];
    let tar = server::tar_of(&[("config.json", &long)]);
    let server = FileServer::start(tar.clone()).await;
    let failed = settled(&fixture.operator, &request(&server, &sha256(&tar)))
        .await
        .pop()
        .unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    for words in ["config.json", "17,825,792 bytes", "16,777,216"] {
        assert!(failed.message.contains(words), "{}", failed.message);
    }
}

#[tokio::test]
async fn what_can_never_be_fetched_is_refused() {
    let fixture = Fixture::new();
    let server = FileServer::start(demo_tar()).await;
    let wanted = request(&server, &sha256(&demo_tar()));
    let wrong = request(&server, &sha256(b"something else"));
    let file = "file:///etc/passwd";
    for (key, url, sha256) in [
        ("../../etc", server.url(), wanted.sha256.clone()),
        // Knowing the digest of another user's model does not give access to it.
        (&wanted.sha256[..32], server.url(), wanted.sha256.clone()),
        (wanted.key.as_str(), server.url(), wrong.sha256.clone()),
        (
            wanted.key.as_str(),
            "http://127.0.0.1:1/other.tar".to_owned(),
            wanted.sha256.clone(),
        ),
        (
            &store_key(file, &wanted.sha256, ""),
            file.to_owned(),
            wanted.sha256.clone(),
        ),
    ] {
        let request = ModelRequest {
            key: key.to_owned(),
            url,
            sha256,
            ..ModelRequest::default()
        };
        let bad = fixture.operator.agent().model(request).await;
        assert_eq!(bad.unwrap_err().code(), Code::InvalidArgument);
    }
    assert!(server.seen().is_empty());
}

#[tokio::test]
async fn a_cached_model_is_handed_to_those_whose_own_source_gives_it() {
    let fixture = Fixture::impatient();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    server.open_by("Bearer t0ken");
    let of = |holder: &str, token| held(&server, &archive, holder, token);
    let own = of("one/nas", Some("t0ken"));
    let ready = settled(&fixture.operator, &own).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    // The same URL and digest from another namespace, with no token or a wrong one.
    for other in [of("", None), of("two/nas", Some("guess"))] {
        let refused = settled(&fixture.operator, &other).await.pop().unwrap();
        assert_eq!(refused.state(), ModelState::Failed);
        assert!(!fixture.has(&other));
    }
    // With the right token it succeeds at once, and is fetched separately.
    let other = of("two/nas", Some("t0ken"));
    let ready = settled(&fixture.operator, &other).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    assert!(fixture.has(&own) && fixture.has(&other));
    // The token is not stored on the disk.
    let found = std::process::Command::new("grep")
        .args(["-r", "-l", "t0ken"])
        .arg(fixture.cache.path())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
}

#[tokio::test]
async fn the_cluster_s_own_ranges_are_not_fetched_from() {
    let fixture = Fixture::new();
    let archive = demo_tar();
    let server = FileServer::start_at("127.0.0.2", archive.clone()).await;
    let refused = settled(&fixture.operator, &request(&server, &sha256(&archive))).await;
    let refused = refused.last().unwrap();
    assert!(
        refused.message.contains("the node itself"),
        "{}",
        refused.message
    );
    let inside = ModelRequest {
        url: "http://10.43.0.1/m.tar".to_owned(),
        key: store_key("http://10.43.0.1/m.tar", &sha256(&archive), ""),
        cluster_ranges: vec!["10.43.0.0/16".to_owned()],
        ..request(&server, &sha256(&archive))
    };
    let refused = settled(&fixture.operator, &inside).await.pop().unwrap();
    assert!(
        refused.message.contains("the cluster itself"),
        "{}",
        refused.message
    );
    assert!(server.seen().is_empty());
}

#[tokio::test]
async fn models_that_nobody_names_are_removed_and_those_in_work_are_not() {
    let fixture = Fixture::new();
    let (one, two) = (demo_tar(), {
        let mut archive = demo_tar();
        archive.extend([0; 512]);
        archive
    });
    let (server_one, server_two) = (
        FileServer::start(one.clone()).await,
        FileServer::start(two.clone()).await,
    );
    let (wanted_one, wanted_two) = (
        request(&server_one, &sha256(&one)),
        request(&server_two, &sha256(&two)),
    );
    for wanted in [&wanted_one, &wanted_two] {
        let ready = settled(&fixture.operator, wanted).await.pop().unwrap();
        assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    }
    // A third model is half downloaded.
    let three = server::model_tar(1_000_000);
    let server_three = FileServer::start(three.clone()).await;
    server_three.faults([Fault::StallAfter(500_000)]);
    let wanted_three = request(&server_three, &sha256(&three));
    until("a half of the third is here", async || {
        model(&fixture.operator, &wanted_three).await;
        let part = fixture
            .cache
            .path()
            .join(format!("partial/{}.part", wanted_three.key));
        fs::metadata(part).is_ok_and(|metadata| metadata.len() >= 500_000)
    })
    .await;

    let removed = retain(&fixture.operator, &[&wanted_two]).await;
    assert_eq!(removed, [wanted_one.key.clone()].into());
    assert!(!fixture.has(&wanted_one) && fixture.has(&wanted_two));
    assert_eq!(
        model(&fixture.operator, &wanted_three).await.state(),
        ModelState::Fetching
    );
    assert_eq!(
        model(&fixture.operator, &wanted_two).await.state(),
        ModelState::Ready
    );
    // After a kill in mid-fetch, no one needs the part.
    let fixture = fixture.restarted();
    let removed = retain(&fixture.operator, &[]).await;
    assert_eq!(
        removed,
        [wanted_two.key.clone(), wanted_three.key.clone()].into()
    );
    for name in ["models", "partial"] {
        let left = fs::read_dir(fixture.cache.path().join(name))
            .unwrap()
            .count();
        assert_eq!(left, 0, "{name}");
    }
    let keys = vec!["..".to_owned()];
    let bad = fixture
        .operator
        .agent()
        .retain(RetainRequest { keys })
        .await;
    assert_eq!(bad.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_killed_agent_is_followed_by_one_that_goes_on() {
    let fixture = Fixture::new();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    let cut = archive.len() / 2;
    server.faults([Fault::StallAfter(cut)]);
    let wanted = request(&server, &sha256(&archive));
    let part = fixture
        .cache
        .path()
        .join(format!("partial/{}.part", wanted.key));
    until("a half is on disk", async || {
        model(&fixture.operator, &wanted).await;
        fs::metadata(&part).is_ok_and(|metadata| metadata.len() == cut as u64)
    })
    .await;
    let fixture = fixture.restarted();
    let ready = settled(&fixture.operator, &wanted).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    assert_eq!(server.sent_bytes(), archive.len(), "bytes came twice");
}
