//! A headless Chromium, driven over a pair of pipes (the DevTools protocol).

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

/// A browser with one page open.
pub(crate) struct Chromium {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    session: Option<String>,
    next: u64,
    /// The address of the page.
    home: String,
    /// Errors and network requests of the page.
    pub(crate) complaints: Vec<String>,
    _profile: TempDir,
}

impl Chromium {
    /// Starts the browser of `SPD_CHROMIUM`, or one by its name in the distributions. Without one,
    /// the test is skipped.
    pub(crate) fn start() -> Option<Self> {
        let named = std::env::var_os("SPD_CHROMIUM").map(PathBuf::from);
        let usual = ["chromium", "chromium-browser", "google-chrome"]
            .map(|name| Path::new("/usr/bin").join(name));
        let Some(program) = named.into_iter().chain(usual).find(|path| path.is_file()) else {
            spd_testing::skip("chromium");
            return None;
        };
        let profile = tempfile::tempdir().unwrap();
        // The protocol uses the descriptors 3 and 4.
        let mut child = Command::new("sh")
            .args([
                "-c",
                "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1",
                "sh",
            ])
            .arg(program)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (send, from) = channel();
        let answers = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || {
            for answer in answers.split(0).map_while(Result::ok) {
                let _ = send.send(serde_json::from_slice(&answer).unwrap());
            }
        });
        let to = child.stdin.take().unwrap();
        let (complaints, session, next) = (Vec::new(), None, 0);
        let mut chromium = Self {
            child,
            to,
            from,
            session,
            next,
            complaints,
            home: String::new(),
            _profile: profile,
        };
        let target = chromium.tell("Target.createTarget", &json!({"url": "about:blank"}));
        let attached = chromium.tell(
            "Target.attachToTarget",
            &json!({"targetId": target["targetId"], "flatten": true}),
        );
        chromium.session = attached["sessionId"].as_str().map(ToOwned::to_owned);
        for domain in [
            "Runtime.enable",
            "Log.enable",
            "Network.enable",
            "Page.enable",
        ] {
            chromium.tell(domain, &json!({}));
        }
        Some(chromium)
    }

    /// Opens a page in a window of so many pixels.
    pub(crate) fn open(&mut self, url: &str, (width, height): (u32, u32)) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        self.tell("Emulation.setDeviceMetricsOverride", &size);
        self.home = url.to_owned();
        self.tell("Page.navigate", &json!({"url": url}));
        self.run("if (document.readyState !== 'complete') await new Promise(done => addEventListener('load', done));");
    }

    /// Runs the body of an asynchronous function in the page, and returns its result.
    pub(crate) fn run(&mut self, script: &str) -> Value {
        let expression = format!("(async () => {{ {script} }})()");
        let asked = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let found = self.tell("Runtime.evaluate", &asked);
        assert!(
            found["exceptionDetails"].is_null(),
            "{}",
            found["exceptionDetails"]
        );
        found["result"]["value"].clone()
    }

    fn tell(&mut self, method: &str, params: &Value) -> Value {
        self.next += 1;
        let mut command = json!({"id": self.next, "method": method, "params": params});
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        self.to
            .write_all(format!("{command}\0").as_bytes())
            .unwrap();
        loop {
            let answer = self.from.recv_timeout(Duration::from_secs(600)).unwrap();
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.hear(&answer);
        }
    }

    fn hear(&mut self, event: &Value) {
        let params = &event["params"];
        match event["method"].as_str().unwrap_or_default() {
            // Advice on the scripts of tests, which read pixels.
            "Log.entryAdded" if params["entry"]["source"] == "rendering" => {}
            "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded" => {
                self.complaints.push(params.to_string())
            }
            "Network.requestWillBeSent" => {
                let url = params["request"]["url"].as_str().unwrap_or_default();
                let own = ["data:", "blob:", self.home.as_str()];
                if !own.iter().any(|own| url.starts_with(own)) {
                    self.complaints.push(url.to_owned());
                }
            }
            _ => {}
        }
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
