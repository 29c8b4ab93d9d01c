//! A browser that is driven through its own protocol, by keys alone: the page of a trace works without a mouse.

use crate::trace_page::HEADLESS;
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Keys by name: code and text.
const KEYS: [(&str, u32, &str); 3] = [("Tab", 9, ""), ("Enter", 13, "\r"), ("ArrowDown", 40, "")];

/// A browser with one page open. It listens on its descriptors 3 and 4.
struct Driven {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    session: Value,
    number: u64,
}

impl Drop for Driven {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Driven {
    fn open(browser: &Path, page: &Path, folder: &Path) -> Driven {
        let shell = "exec \"$@\" 3<&0 4>&1 1>&2 0</dev/null";
        let mut child = Command::new("/bin/sh")
            .args(["-c", shell, "sh"])
            .arg(browser)
            .args(HEADLESS)
            .args(["--remote-debugging-pipe", "--window-size=1300,900"])
            .arg(format!("--user-data-dir={}", folder.join("keys").display()))
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the browser starts");
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let mut driven = Driven {
            child,
            to: to.expect("a pipe"),
            from: BufReader::new(from.expect("a pipe")),
            session: Value::Null,
            number: 0,
        };
        let url = format!("file://{}", page.display());
        let target = driven.ask("Target.createTarget", json!({ "url": url }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        driven.session = driven.ask("Target.attachToTarget", attach)["sessionId"].clone();
        driven.ask(
            "Emulation.setFocusEmulationEnabled",
            json!({ "enabled": true }),
        );
        while driven.value("document.body?.dataset.state") != "ready" {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        driven
    }

    /// What the browser answers. Messages end with a zero; events between them are passed over.
    fn ask(&mut self, method: &str, parameters: Value) -> Value {
        self.number += 1;
        let mut message = json!({ "id": self.number, "method": method, "params": parameters });
        if self.session != Value::Null {
            message["sessionId"] = self.session.clone();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).expect("the browser listens");
        loop {
            let mut answer = Vec::new();
            self.from
                .read_until(0, &mut answer)
                .expect("the browser answers");
            assert_eq!(answer.pop(), Some(0), "the browser has ended: {message}");
            let answer: Value = serde_json::from_slice(&answer).expect("JSON");
            if answer["id"] == self.number {
                assert!(answer["error"].is_null(), "{message}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    /// Value of an expression in the page.
    fn value(&mut self, expression: &str) -> Value {
        let about = json!({ "expression": expression, "returnByValue": true });
        let answer = self.ask("Runtime.evaluate", about);
        assert!(
            answer["exceptionDetails"].is_null(),
            "{expression}: {answer}"
        );
        answer["result"]["value"].clone()
    }

    fn press(&mut self, name: &str) {
        let (key, code, text) = *KEYS.iter().find(|key| key.0 == name).expect("a key");
        for kind in ["keyDown", "keyUp"] {
            let mut about =
                json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if kind == "keyDown" && !text.is_empty() {
                about["text"] = text.into();
            }
            self.ask("Input.dispatchKeyEvent", about);
        }
    }

    /// Goes on with Tab until what has the focus matches a selector. Where the focus is, is seen at each step.
    fn tab_to(&mut self, selector: &str) {
        for _ in 0..600 {
            self.press("Tab");
            let seen = self.value(
                "(() => { const at = document.activeElement; const style = getComputedStyle(at); \
                 return at === document.body || (at.matches(':focus-visible') && style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0) })()",
            );
            let there = self.value("document.activeElement.outerHTML.slice(0, 200)");
            assert_eq!(seen, true, "the focus is not seen: {there}");
            if self.value(&format!("document.activeElement.matches({selector:?})")) == true {
                return;
            }
        }
        panic!("no key leads to {selector}");
    }

    /// Waits until an expression is true: the page answers a new address a little later.
    fn reaches(&mut self, expression: &str) {
        for _ in 0..500 {
            if self.value(expression) == true {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let (hash, at) = (
            self.value("location.hash"),
            self.value("document.activeElement.outerHTML.slice(0, 200)"),
        );
        panic!("{expression}: {hash}, {at}");
    }

    fn reaches_hash(&mut self, part: &str) {
        self.reaches(&format!("location.hash.includes({part:?})"));
    }
}

/// Filters, zoom, views and a single message are reached and used with Tab, Enter and an arrow key.
pub fn check(browser: &Path, page: &Path, folder: &Path) {
    let mut driven = Driven::open(browser, page, folder);
    for view in ["timeline", "list", "notes"] {
        driven.tab_to(&format!("#views a[data-view={view}]"));
    }
    for filter in [
        "call", "protocol", "path", "rank", "place", "min", "max", "from", "to",
    ] {
        driven.tab_to(&format!("#filter [name={filter}]"));
        if filter == "rank" {
            driven.press("ArrowDown");
            driven.reaches_hash("rank=0");
        }
    }
    driven.tab_to("[data-zoom=in]");
    driven.press("Enter");
    driven.reaches_hash("from=");
    // What was used keeps the focus, though the views are new.
    driven.reaches("document.activeElement.dataset.zoom === 'in'");
    driven.tab_to("[data-zoom=all]");
    driven.press("Enter");
    driven.tab_to("#view-matrix .heat a");
    driven.press("Enter");
    driven.reaches_hash("pair=");
    driven.tab_to("#view-list a");
    driven.press("Enter");
    driven.reaches_hash("view=message");
    driven.reaches("document.activeElement.id === 'title-message'");
    driven.reaches("document.activeElement.textContent.startsWith('Message ')");
    assert_eq!(driven.value("document.body.dataset.state"), "ready");
}
