// SPDX-License-Identifier: Apache-2.0

package yamlfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/podlace/podlace/pkg/store"
)

// File is a file that was read.
type File struct {
	Name string
	Data []byte
}

// Files reads one file, all files in a folder, or standard input. With an error it returns the files that it could read.
func Files(stdin io.Reader, name string) (files []File, err error) {
	if name == "-" {
		data, err := io.ReadAll(stdin)
		if err != nil {
			return nil, err
		}
		return []File{{Name: "stdin", Data: data}}, nil
	}
	names := []string{name}
	if info, statErr := os.Stat(name); statErr == nil && info.IsDir() {
		names = nil
		var entries []os.DirEntry
		entries, err = os.ReadDir(name)
		for _, e := range entries { // those that container runtimes or kubectl would read
			if slices.Contains([]string{".conflist", ".conf", ".json", ".yaml", ".yml"}, filepath.Ext(e.Name())) && !e.IsDir() {
				names = append(names, filepath.Join(name, e.Name()))
			}
		}
		if len(names) == 0 && err == nil {
			err = fmt.Errorf("%s: the folder has no file that ends in .conflist, .conf, .json, .yaml or .yml", name)
		}
	}
	for _, name := range names {
		data, unread := store.ReadFile(name)
		if err = errors.Join(err, unread); unread == nil {
			files = append(files, File{Name: name, Data: data})
		}
	}
	return files, err
}
