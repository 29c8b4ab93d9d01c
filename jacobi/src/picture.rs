//! A picture of a field as PNG.

use crate::args::Size;
use crate::failure::{Failure, Outcome};
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

/// Longest side of a picture, in pixels.
const SIDE_MAX: u64 = 1024;
/// Shortest side, so that a flat domain can be seen.
const SIDE_MIN: u64 = 64;

/// Height and width in pixels of the picture of a domain: its aspect ratio, as far as the limits allow.
pub fn dimensions(size: Size) -> (u64, u64) {
    let longest = size.rows.max(size.cols);
    let scaled = |side: u64| {
        if longest <= SIDE_MAX {
            side
        } else {
            (side as u128 * SIDE_MAX as u128 / longest as u128) as u64
        }
    };
    let side = |n: u64| scaled(n).clamp(SIDE_MIN, SIDE_MAX);
    (side(size.rows), side(size.cols))
}

/// Dark blue through green to yellow, rising in lightness, so that it also reads in grey.
const COLOURS: [[f32; 3]; 5] = [
    [48.0, 18.0, 84.0],
    [52.0, 84.0, 140.0],
    [32.0, 144.0, 140.0],
    [94.0, 201.0, 98.0],
    [253.0, 231.0, 37.0],
];

/// Colour of a value in [0, 1]; red for what is not a number.
fn colour(value: f32) -> [u8; 3] {
    if value.is_nan() {
        return [255, 0, 0];
    }
    let place = value.clamp(0.0, 1.0) * (COLOURS.len() - 1) as f32;
    let below = (place as usize).min(COLOURS.len() - 2);
    let share = place - below as f32;
    std::array::from_fn(|i| {
        (COLOURS[below][i] * (1.0 - share) + COLOURS[below + 1][i] * share).round() as u8
    })
}

/// Writes pixels, row by row, with colours spread over the range of their values.
pub fn write(path: &Path, height: u64, width: u64, pixels: &[f32]) -> Outcome<()> {
    let finite = || pixels.iter().copied().filter(|v| v.is_finite());
    let (low, high) = (
        finite().fold(f32::INFINITY, f32::min),
        finite().fold(f32::NEG_INFINITY, f32::max),
    );
    let range = if high > low { high - low } else { 1.0 };
    let bytes: Vec<u8> = pixels
        .iter()
        .flat_map(|v| colour((v - low) / range))
        .collect();
    let failed =
        |e: &dyn std::fmt::Display| Failure::input(format!("cannot write {}: {e}", path.display()));
    let file = File::create(path).map_err(|e| failed(&e))?;
    let mut encoder = png::Encoder::new(BufWriter::new(file), width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(|e| failed(&e))?;
    writer.write_image_data(&bytes).map_err(|e| failed(&e))?;
    writer.finish().map_err(|e| failed(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_keep_to_their_limits() {
        assert_eq!(
            dimensions(Size {
                rows: 8,
                cols: 1 << 30
            }),
            (64, 1024)
        );
        assert_eq!(
            dimensions(Size {
                rows: 4096,
                cols: 2048
            }),
            (1024, 512)
        );
        assert_eq!(
            dimensions(Size {
                rows: 500,
                cols: 100
            }),
            (500, 100)
        );
    }

    #[test]
    fn what_is_written_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        write(&path, 2, 3, &[0.0, 0.5, 1.0, 0.25, f32::NAN, 0.0]).unwrap();
        let mut reader = png::Decoder::new(std::io::BufReader::new(File::open(&path).unwrap()))
            .read_info()
            .unwrap();
        let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut bytes).unwrap();
        assert_eq!((info.width, info.height), (3, 2));
        assert_eq!(
            bytes[..3],
            [48, 18, 84],
            "the least value has the first colour"
        );
        assert_eq!(bytes[6..9], [253, 231, 37], "the largest has the last");
        assert_eq!(bytes[12..15], [255, 0, 0], "what is no number is red");
    }

    #[test]
    fn a_folder_that_is_not_there_is_one_line() {
        let failure = write(Path::new("/nonexistent/a.png"), 1, 1, &[0.0]).unwrap_err();
        assert!(failure
            .message
            .starts_with("cannot write /nonexistent/a.png"));
    }
}
