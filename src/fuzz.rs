//! Fuzzing: whatever the input is, nothing panics, hangs or takes memory without bound.
//!
//! `cargo test` runs each target (`bolero::check!`) on the inputs kept beside it, in `__fuzz__/NAME/corpus` and
//! `__fuzz__/NAME/crashes`, and on some thousand random ones. `ci/long fuzz` runs each for minutes, guided by
//! coverage. What is found there is kept as a file in `crashes`, whose name says what it was.
//!
//! An input is read as a list of choices ([`Bytes`]): where to write over what is sound, and what. So random
//! inputs come past the first look at a magic number, too.

mod bytes;
mod folder;

pub(crate) use bytes::Bytes;
use folder::folder;
pub(crate) use folder::is_guided;

#[test]
fn options() {
    use crate::config::{parse_size, Config, NAMES};
    const VALUES: [&str; 10] = [
        "on",
        "64K",
        "16",
        "0.5",
        "direct,relay,host",
        "a.json",
        "debug",
        "=,:;",
        "-1",
        "auto",
    ];
    bolero::check!(name = "options")
        .with_iterations(5000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let mut set = std::collections::HashMap::new();
            for _ in 0..input.byte() % 6 {
                let name = NAMES[usize::from(input.byte()) % NAMES.len()];
                let value = VALUES[usize::from(input.byte()) % VALUES.len()];
                let value = input.edited(value.as_bytes());
                let value = std::os::unix::ffi::OsStringExt::from_vec(value);
                set.insert(name, value);
            }
            let look_up = |name: &str| set.get(name).cloned();
            let (config, warnings) = Config::from_lookup(look_up);
            assert!(warnings.len() <= 3 * set.len() + 3, "{warnings:?}");
            for warning in warnings {
                assert_eq!(warning.to_string().lines().count(), 1, "{warning}");
            }
            let _ = config.rows();
            let text = input.text("64K");
            let _ = parse_size(&text);
            let _ = crate::config::unknown_names([format!("ANABRANCH_{text}")].into_iter());
        });
}

/// The statistics of another rank, and what is made of them.
#[test]
fn details_of_statistics() {
    use crate::stats::details::Details;
    bolero::check!(name = "details_of_statistics")
        .with_iterations(5000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let count = input.below(300);
            let words: Vec<u64> = (0..count)
                .map(|_| match input.byte() % 3 {
                    0 => input.word(),
                    _ => u64::from(input.byte()) % 12,
                })
                .collect();
            if let Some(details) = Details::from_words(&words) {
                let again = Details::from_words(&details.words());
                assert!(again.is_some(), "what it says itself can be read");
            }
        });
}

/// What comes with files from another rank.
#[test]
fn parcels() {
    use crate::cuda::chunks::told;
    bolero::check!(name = "parcels")
        .with_iterations(20_000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let files = usize::from(input.byte() % 5);
            let mut words = vec![
                0x414e_4143_4855_4e4b,
                input.word(),
                input.word(),
                input.word() >> 20 << 21,
            ];
            for _ in 0..2 * files {
                words.push(match input.byte() % 3 {
                    0 => input.word(),
                    _ => u64::from(input.byte()) << 21,
                });
            }
            let cut = words.len() - usize::from(input.byte() / 250).min(words.len());
            if let Some((_, chunks)) = told(&words[..cut], files) {
                assert!(files > 0 && chunks.len() == files);
                for chunk in chunks {
                    assert!(chunk.bytes > 0 && chunk.offset + chunk.bytes <= words[3]);
                }
            }
            let _ = told(&words, files + 1);
        });
}

#[test]
fn trace_file() {
    use crate::trace::read::{Reader, VERSION};
    use crate::trace::record::Record;
    let header = br#"{"library":"0.1","job":1,"rank":0,"size":2,"host":"n","pid":9,"is_simulated":false,"opened":[5,6],
        "functions":["MPI_Send"],"states":["done"],"protocols":["get"],"reasons":["too_small"]}"#;
    bolero::check!(name = "trace_file")
        .with_iterations(5000)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let mut file = b"ANBTRACE".to_vec();
            let text = if input.byte() % 2 == 0 {
                header.to_vec()
            } else {
                input.edited(header)
            };
            file.extend(VERSION.to_le_bytes());
            file.extend((text.len() as u32).to_le_bytes());
            file.extend(text);
            for _ in 0..input.below(20) {
                let mut words: [u64; 8] = std::array::from_fn(|_| input.word());
                words[0] = words[0] & !0xff | u64::from(input.byte() % 13);
                words
                    .iter()
                    .for_each(|word| file.extend(word.to_le_bytes()));
            }
            if input.byte() % 4 == 0 {
                file = input.edited(&file);
            }
            let Ok(mut reader) = Reader::new(&file[..]) else {
                return;
            };
            let mut count = 0;
            while let Ok(Some(record)) = reader.next_record() {
                count += 1;
                let again = Record::decode(&record.encode()).expect("a record");
                assert_eq!(Record::decode(&again.encode()), Some(again));
            }
            assert!(count * 64 <= file.len());
        });
}

/// Topology files as text, and what a plan makes of them.
#[test]
fn topology_file() {
    use crate::topology::file::File;
    let shipped = ["beluga", "narval", "dgx1-v100", "hgx-h200"].map(|name| {
        let path = format!(
            "{}/simcuda/topologies/{name}.toml",
            env!("CARGO_MANIFEST_DIR")
        );
        std::fs::read_to_string(path).expect("a topology that is shipped")
    });
    bolero::check!(name = "topology_file")
        .with_iterations(400)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let which = usize::from(input.byte() % 4);
            let text = input.text(&shipped[which]);
            let Ok(file) = toml::from_str::<File>(&text) else {
                return;
            };
            match file.topology() {
                Ok(topology) => {
                    let model = crate::model::Model::nominal(&topology);
                    let _ = model.check_for(&topology);
                    let again = File::of(&topology).topology();
                    assert!(again.is_ok(), "{:?}", again.err());
                }
                Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
            }
        });
}

/// Files in the user's cache folder: they may be damaged, or shared with another version.
#[test]
fn kept_files() {
    use crate::model::{cache, links, Model};
    let folder = folder();
    let topology = crate::topology::tests::shipped("narval");
    let machine = cache::Machine {
        gpus: (0..4).map(|gpu| format!("GPU-{gpu}")).collect(),
        driver: "12.8".into(),
    };
    let mut named = topology.clone();
    for (gpu, uuid) in named.gpus.iter_mut().zip(&machine.gpus) {
        gpu.uuid = Some(uuid.clone());
    }
    let file = machine.file(folder.path());
    let model = Model::nominal(&named);
    cache::store(&file, &machine, &named, &model).expect("stored");
    cache::link(&file, &machine).expect("linked");
    let model_text = std::fs::read_to_string(&file).expect("read");
    let mut known = links::Links::new("12.8", 7, 1000);
    known.note_pull(
        "GPU-1",
        links::Way {
            alpha_us: 2.0,
            gb_s: 30.0,
        },
    );
    let links_text = serde_json::to_string(&known).expect("JSON");
    bolero::check!(name = "kept_files")
        .with_iterations(400)
        .for_each(|bytes: &[u8]| {
            let mut input = Bytes::new(bytes);
            let (text, links_text) = (
                input.edited(model_text.as_bytes()),
                input.edited(links_text.as_bytes()),
            );
            std::fs::write(&file, text).expect("written");
            std::fs::write(folder.path().join("links-GPU-0.json"), links_text).expect("written");
            let one_line = |error: String| assert_eq!(error.lines().count(), 1, "{error}");
            match cache::find(folder.path(), &machine.gpus, &machine.driver) {
                Ok(measured) => measured
                    .model
                    .check_for(&measured.topology)
                    .expect("checked"),
                Err(error) => one_line(error.to_string()),
            }
            if let Err(error) = links::load(folder.path(), "GPU-0", "12.8", 7, 1000) {
                one_line(error.to_string());
            }
        });
}
