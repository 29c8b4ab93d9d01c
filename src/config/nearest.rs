//! The word that was meant.

/// The known word that is nearest to `word`, if it is near enough to be meant.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_ascii_lowercase();
    let distance = |known: &str| strsim::damerau_levenshtein(&word, &known.to_ascii_lowercase());
    let (distance, found) = known
        .into_iter()
        .map(|known| (distance(known), known))
        .min_by_key(|(distance, _)| *distance)?;
    // More than a third of the letters wrong is another word.
    (distance * 3 <= word.len().max(3)).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_near_is_meant() {
        let known = ["beluga", "narval", "dgx1-v100", "hgx-h200"];
        assert_eq!(nearest("hgx-h20", known), Some("hgx-h200"));
        assert_eq!(nearest("Belgua", known), Some("beluga"));
        assert_eq!(nearest("dgx-v100", known), Some("dgx1-v100"));
        assert_eq!(nearest("atlantis", known), None);
        assert_eq!(nearest("", known), None);
    }
}
