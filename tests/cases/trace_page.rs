//! The page of a trace, in a browser: its sums are those of the messages under the same filter, it needs no network, and what
//! goes wrong in it is seen.

use crate::page_keys;
use crate::support::{job, on};
use anabranch_engine::trace::read::Reader;
use anabranch_engine::trace::record::Record;
use anabranch_tests::{built, cannot_be_made_here, run_bounded, scratch_folder};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use xtask::layout::Layout;

/// A browser without a window, which asks nothing of a network by itself.
pub const HEADLESS: [&str; 6] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
];

/// The browser, or None after saying how to get it.
fn browser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let found = ["chromium", "chromium-browser", "google-chrome"]
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)))
        .find(|file| file.exists());
    if found.is_none() {
        cannot_be_made_here("Chromium", "ci/setup installs it on Debian");
    }
    found
}

/// A page, and the folder for what a browser leaves.
struct Page {
    browser: PathBuf,
    file: PathBuf,
    folder: PathBuf,
}

impl Page {
    /// What the browser writes to stdout.
    fn run(&self, hash: &str, options: &[&str]) -> String {
        let mut command = Command::new(&self.browser);
        command
            .args(HEADLESS)
            .arg(format!(
                "--user-data-dir={}",
                self.folder.join("profile").display()
            ))
            .args(options)
            .arg(format!("file://{}{hash}", self.file.display()))
            .env_remove("LD_PRELOAD");
        let finished = run_bounded(&mut command, &self.folder, Duration::from_secs(100));
        assert_eq!(finished.code, Some(0), "{hash}: {}", finished.stderr);
        finished.stdout
    }

    /// The page as it stands after its scripts.
    fn dom(&self, hash: &str) -> String {
        self.run(hash, &["--virtual-time-budget=20000", "--dump-dom"])
    }

    /// What the page is made from.
    fn data(&self) -> Value {
        json_in(&fs::read_to_string(&self.file).expect("the page"), "data")
    }

    /// A page with one part of its text replaced.
    fn with(&self, name: &str, from: &str, to: &str) -> Page {
        let text = fs::read_to_string(&self.file).expect("the page");
        assert!(text.contains(from), "{name}: there is no {from}");
        let file = self.folder.join(format!("with-{name}.html"));
        fs::write(&file, text.replacen(from, to, 1)).expect("it is written");
        Page {
            browser: self.browser.clone(),
            folder: self.folder.clone(),
            file,
        }
    }

    /// The sums of what a filter shows.
    fn sums(&self, hash: &str) -> Value {
        let dom = self.dom(hash);
        assert!(dom.contains("data-state=\"ready\""), "{hash}: {dom}");
        json_in(&dom, "sums")
    }
}

/// The JSON in an element of a page.
fn json_in(page: &str, id: &str) -> Value {
    let begin = format!("<script type=\"application/json\" id=\"{id}\">");
    let text = page.split(&begin).nth(1).expect("the element is there");
    let text = text.split("</script>").next().unwrap_or_default();
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{id}: {error}: {text}"))
}

/// What a trace has, read apart from what makes the page.
struct Trace {
    files: Vec<PathBuf>,
    /// With --messages.
    json: Value,
    /// Functions by rank and number of the call.
    functions: BTreeMap<(u64, u64), String>,
}

fn read(files: Vec<PathBuf>) -> Trace {
    let out = anabranch(&files, &["--json", "--messages"]);
    let json = serde_json::from_str(&out).expect("JSON");
    let mut functions = BTreeMap::new();
    for file in &files {
        let file = BufReader::new(File::open(file).expect("a trace"));
        let mut reader = Reader::new(file).expect("a header");
        while let Some(record) = reader.next_record().expect("a record") {
            if let Record::Call(call) = record {
                let name = &reader.header.functions[usize::from(call.function)];
                for number in call.number..call.number + u64::from(call.times) {
                    functions.insert((u64::from(reader.header.rank), number), name.clone());
                }
            }
        }
    }
    Trace {
        files,
        json,
        functions,
    }
}

fn anabranch(files: &[PathBuf], options: &[&str]) -> String {
    let out = Command::new(&built().command)
        .arg("trace")
        .args(files)
        .args(options)
        .output()
        .expect("the command runs");
    assert!(out.status.success(), "{out:?}");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// What is looked at. Times and sizes are as the page says that it took them.
#[derive(Default)]
struct Filter<'a> {
    call: Option<&'a str>,
    protocol: Option<&'a str>,
    rank: Option<u64>,
    time: Option<(u64, u64)>,
    size: Option<(u64, u64)>,
}

impl Trace {
    fn messages(&self) -> &[Value] {
        self.json["messages"].as_array().expect("messages")
    }

    fn function(&self, message: &Value) -> &str {
        let ends = [("source", "sender"), ("destination", "receiver")];
        let found = ends.iter().find_map(|(rank, side)| {
            let number = message[*side]["call"].as_u64()?;
            self.functions.get(&(message[*rank].as_u64()?, number))
        });
        found.map_or("?", String::as_str)
    }

    /// Of a message that the MPI library carries, each end is a message here.
    fn is_counted(&self, message: &Value) -> bool {
        let ranks = self.json["ranks"].as_array().expect("ranks");
        let has_file = |rank: &Value| ranks.iter().any(|row| row["rank"] == *rank);
        let is_other_end = message["is_by_mpi"] == true && message["sender"].is_null();
        !is_other_end || !(message["source"].is_null() || has_file(&message["source"]))
    }

    /// What the page must say: messages, bytes, and both by call, protocol and pair.
    fn sums(&self, filter: &Filter) -> (u64, u64, BTreeMap<String, (u64, u64)>) {
        let mut sums = (0, 0, BTreeMap::new());
        for message in self.messages() {
            let bytes = message["bytes"].as_u64().expect("bytes");
            let (sender, receiver) = (&message["sender"], &message["receiver"]);
            let side = if sender.is_null() { receiver } else { sender };
            let begin = side["at_ns"].as_u64().expect("a time");
            let protocols = [&receiver["protocol"], &sender["protocol"]];
            let protocol = protocols.iter().find_map(|it| it.as_str());
            let (protocol, call) = (protocol.unwrap_or("none"), self.function(message));
            let ends = [&message["source"], &message["destination"]];
            let within = |at: u64, range: Option<(u64, u64)>| {
                range.is_none_or(|(from, to)| from <= at && at <= to)
            };
            let is_shown = self.is_counted(message)
                && filter.call.is_none_or(|wanted| wanted == call)
                && filter.protocol.is_none_or(|wanted| wanted == protocol)
                && filter
                    .rank
                    .is_none_or(|wanted| ends.iter().any(|end| **end == wanted))
                && within(bytes, filter.size)
                && within(begin, filter.time);
            if !is_shown {
                continue;
            }
            let name = |rank: &Value| rank.as_u64().map_or("?".into(), |rank| rank.to_string());
            let pair = format!("{}-{}", name(ends[0]), name(ends[1]));
            sums = (sums.0 + 1, sums.1 + bytes, sums.2);
            for key in [format!("call {call}"), format!("protocol {protocol}"), pair] {
                let group = sums.2.entry(key).or_insert((0, 0));
                *group = (group.0 + 1, group.1 + bytes);
            }
        }
        sums
    }
}

/// The same from the page.
fn told(sums: &Value) -> (u64, u64, BTreeMap<String, (u64, u64)>) {
    let number = |value: &Value| value.as_u64().expect("a number");
    let mut groups = BTreeMap::new();
    for (field, prefix) in [
        ("by_call", "call "),
        ("by_protocol", "protocol "),
        ("by_pair", ""),
    ] {
        for (name, of) in sums[field].as_object().expect("groups") {
            groups.insert(format!("{prefix}{name}"), (number(&of[0]), number(&of[1])));
        }
    }
    (number(&sums["messages"]), number(&sums["bytes"]), groups)
}

/// The name that most messages have.
fn most<'a>(names: impl Iterator<Item = &'a str>) -> &'a str {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    names.for_each(|name| *counts.entry(name).or_default() += 1);
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    most.expect("there are messages").0
}

/// Sums of the page under a filter are those of the messages under the same one.
fn check_filters(page: &Page, trace: &Trace) {
    let all = trace.messages().iter();
    let call = most(all.clone().map(|message| trace.function(message)));
    let protocols = all.filter_map(|message| message["receiver"]["protocol"].as_str());
    let protocol = most(protocols);
    let data = page.data();
    let number = |value: &Value| value.as_u64().expect("a number");
    let (span, width) = (number(&data["span_ns"]), number(&data["width_ns"]));
    assert!(span / width < 200 && number(&data["bins"]) <= 200);
    let whole = page.sums("");
    assert_eq!(told(&whole), trace.sums(&Filter::default()), "{whole}");
    assert!(told(&whole).0 > 20, "{whole}");
    let by = |field: &str| -> u64 {
        let groups = whole[field].as_object().expect("groups").values();
        groups.map(|group| number(&group[0])).sum()
    };
    assert_eq!(
        (by("by_path"), by("by_size")),
        (told(&whole).0, told(&whole).0)
    );
    let (from, to) = (span / 5, span / 5 * 4);
    let ms = |ns: u64| format!("{}.{:06}", ns / 1_000_000, ns % 1_000_000);
    let times = format!("from={}&to={}", ms(from), ms(to));
    let sizes = "min=5000&max=400000";
    let cases = [
        (Some(call), None, None, false, false),
        (None, Some(protocol), None, false, false),
        (None, None, Some(1), false, false),
        (None, None, None, true, false),
        (None, None, None, false, true),
        (Some(call), Some(protocol), Some(0), true, true),
        (Some("MPI_Nothing"), None, None, false, false),
    ];
    for (call, protocol, rank, has_times, has_sizes) in cases {
        let parts = [
            call.map(|call| format!("call={call}")),
            protocol.map(|protocol| format!("protocol={protocol}")),
            rank.map(|rank: u64| format!("rank={rank}")),
            has_times.then(|| times.clone()),
            has_sizes.then(|| sizes.to_owned()),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        let hash = format!("#{}", parts.join("&"));
        let sums = page.sums(&hash);
        let taken = |field: &str| number(&sums["filter"][field]);
        let (begin, end) = (taken("from_ns"), taken("to_ns"));
        if has_times {
            // As far as the borders of bins, and not further.
            assert!(begin <= from && from - begin < width, "{hash}: {sums}");
            assert!(end >= to && end - to < width, "{hash}: {sums}");
        }
        if has_sizes {
            assert_eq!(
                (taken("min_bytes"), taken("max_bytes")),
                (4096, (1 << 19) - 1)
            );
        }
        let filter = Filter {
            call,
            protocol,
            rank,
            time: has_times.then(|| (begin, end - 1)),
            size: has_sizes.then_some((4096, (1 << 19) - 1)),
        };
        assert_eq!(told(&sums), trace.sums(&filter), "{hash}: {sums}");
    }
}

/// A message can be opened, wrong addresses show nothing, and what cannot be read is said.
fn check_errors(page: &Page, trace: &Trace) {
    let number = &page.data()["single"][0][0];
    let dom = page.dom(&format!("#message={number}&view=message"));
    assert!(dom.contains(&format!(">Message {number}<")), "{dom}");
    assert!(dom.contains("payload begins to move"), "{dom}");
    let wrong = "#call=%3Cb%3Ewrong&rank=99&from=x&to=-1&min=abc&max=1e99&place=7&pair=8-9&message=1e9&view=nothing&by=2";
    let sums = page.sums(wrong);
    assert_eq!((&sums["messages"], &sums["bytes"]), (&0.into(), &0.into()));
    for (name, from, to) in [
        ("data", "id=\"data\">{", "id=\"data\">"),
        (
            "script",
            "function show() {",
            "function show() { nothing();",
        ),
        (
            "network",
            "function show() {",
            "function show() { fetch(\"http://192.0.2.1/\").catch(() => 0);",
        ),
    ] {
        let broken = page.with(name, from, to);
        let dom = broken.dom("");
        assert!(dom.contains("data-state=\"failed: "), "{name}: {dom}");
    }
    // A host may have any name.
    let bytes = fs::read(&trace.files[0]).expect("a trace");
    let length = usize::from(bytes[12]) + (usize::from(bytes[13]) << 8);
    let (header, records) = bytes[16..].split_at(length);
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    header["host"] = "</script><img src=x onerror=fail(1)>".into();
    let header = header.to_string().into_bytes();
    let named = page.folder.join("named");
    let length = (header.len() as u32).to_le_bytes();
    let whole = [&bytes[..12], &length, &header, records].concat();
    fs::write(&named, whole).expect("it is written");
    let named = make(&page.browser, &page.folder, "named.html", &[named]);
    let dom = named.dom("");
    assert!(dom.contains("data-state=\"ready\""), "{dom}");
    assert!(
        dom.contains("&lt;img src=x") && !dom.contains("<img"),
        "{dom}"
    );
}

/// What a reader may do, one after the other, changes the address and nothing else.
fn check_controls(page: &Page) {
    let acts = r#"<script>
        const acts = [
            () => { form.elements.rank.value = "1"; form.elements.rank.dispatchEvent(new Event("change", { bubbles: true })); },
            () => { form.elements.to.value = "1000000"; form.elements.to.dispatchEvent(new Event("change", { bubbles: true })); },
            () => document.querySelector("[data-zoom=in]").click(),
            () => document.querySelector("[data-zoom=later]").click(),
            () => document.querySelector("[data-zoom=out]").click(),
            () => document.querySelector("[data-zoom=all]").click(),
            () => document.querySelector("[data-zoom=in]").click(),
            () => document.querySelector(".row .label a").click(),
            () => document.querySelector("[data-zoom=out]").click(),
            () => document.querySelector(".heat a").click(),
            () => document.querySelector("[id=view-contenders] a").click(),
            () => document.querySelector("[id=view-list] a").click(),
            () => document.querySelector("nav a").click(),
        ];
        const act = () => {
            if (acts.length === 0) return document.body.dataset.acted = location.hash.replaceAll("&", " ");
            acts.shift()();
            setTimeout(act, 100);
        };
        act();
        </script></body>"#;
    let dom = page.with("acts", "</body>", acts).dom("");
    assert!(dom.contains("data-state=\"ready\""), "{dom}");
    let acted = dom.split("data-acted=\"").nth(1).expect("it ended");
    let acted = acted.split('"').next().unwrap_or_default();
    for part in [
        "call=MPI_",
        "protocol=",
        "rank=0",
        "pair=",
        "message=",
        "view=timeline",
    ] {
        assert!(acted.contains(part), "{part}: {acted}");
    }
    assert!(
        !acted.contains("from=") && !acted.contains("to="),
        "{acted}"
    );
}

fn make(browser: &Path, folder: &Path, name: &str, files: &[PathBuf]) -> Page {
    let file = folder.join(name);
    let out = anabranch(files, &["--html", &file.display().to_string()]);
    assert!(out.contains("Messages from rank to rank"), "{out}");
    let text = fs::read_to_string(&file).expect("the page");
    assert_eq!(text, anabranch(files, &["--html", "-"]), "the same again");
    assert!(text.len() < 5_000_000, "{} bytes", text.len());
    // Nothing in it leads to a network, and nothing could go there.
    assert!(text.contains("content=\"default-src 'none';"), "no policy");
    assert!(
        !text.contains("http:") && !text.contains("https:"),
        "it names an address"
    );
    Page {
        browser: browser.to_path_buf(),
        file,
        folder: folder.to_path_buf(),
    }
}

/// For people to look at: how the page looks, in light and in dark.
fn take_pictures(page: &Page, name: &str) {
    let kept = Layout::new(false).target.join("trace-page");
    fs::create_dir_all(&kept).expect("the folder of pictures");
    let slowest = &page.data()["single"][0][0];
    for (scheme, number) in [("light", 1), ("dark", 0)] {
        let file = kept.join(format!("{name}-{scheme}.png"));
        let _ = fs::remove_file(&file);
        page.run(
            &format!("#message={slowest}"),
            &[
                "--hide-scrollbars",
                "--window-size=1300,5200",
                &format!("--blink-settings=preferredColorScheme={number}"),
                "--virtual-time-budget=20000",
                &format!("--screenshot={}", file.display()),
            ],
        );
        let bytes = fs::metadata(&file).map_or(0, |file| file.len());
        assert!(bytes > 20_000, "{}: {bytes} bytes", file.display());
    }
    let _ = fs::copy(&page.file, kept.join(format!("{name}.html")));
}

#[test]
fn sums_of_a_page_are_those_of_the_messages() {
    let Some(browser) = browser() else { return };
    on("openmpi", |mpi| {
        for (program, ranks) in [("p2p", 2), ("comms", 4)] {
            let folder = scratch_folder("trace-page");
            let name = folder.join("trace").display().to_string();
            job(mpi, ranks, program)
                .env("ANABRANCH_TRACE", &name)
                .passes();
            let files = (0..ranks).map(|rank| folder.join(format!("trace.{rank}")));
            let trace = read(files.collect());
            let page = make(&browser, &folder, "page.html", &trace.files);
            check_filters(&page, &trace);
            if ranks == 2 {
                check_errors(&page, &trace);
                check_controls(&page);
                page_keys::check(&browser, &page.file, &folder);
            }
            take_pictures(&page, program);
            let _ = fs::remove_dir_all(folder);
        }
    });
}
