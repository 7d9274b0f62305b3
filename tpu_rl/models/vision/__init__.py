"""The part of a vision-language model that reads images: a tower and a projector.

The tower makes a vector of each patch of an image, and the projector makes it as wide as the
residual stream of the text. These are the image's features, one for each token that stands for the
image. `towers.TOWERS` lists the families: how each is read from files, and its forward pass.

**Tokens of images.** A text refers to features by token ids from `VocabConfig.size` on: id V + f is
feature f of the images that come with the text (`features`). So rows with images are rows of token
ids like all others: they share prompts, and they are packed, cached and branched alike.
"""
